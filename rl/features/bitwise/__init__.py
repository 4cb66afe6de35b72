"""Arithmetic that makes the log-probs of trainer and engine bitwise equal (`model.numerics=bitwise`)."""
