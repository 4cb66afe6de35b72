"""Tools and environments that a config can name: calculator, python, search, gsm8k."""
