"""Samples that are unfinished at the end of a generation and continue in the next step."""
