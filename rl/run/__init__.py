"""The run: its steps, validation and checkpoints."""
