"""Environments of other packages as environments of this project; each needs an extra of setup.py."""
