"""Validation of the checkpoints of a run, without training (`run.mode=evaluate`)."""
