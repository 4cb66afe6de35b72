"""Carry-over: samples that are unfinished at the end of a generation continue in the next step."""
