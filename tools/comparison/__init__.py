"""Comparison of two runs: which one is better."""
