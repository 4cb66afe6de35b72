"""Comparison of two runs: which one is better, and where they part."""
