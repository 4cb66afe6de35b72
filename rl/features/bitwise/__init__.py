"""Arithmetic with which trainer and engine compute bitwise equal log-probs (`model.numerics=bitwise`)."""
