"""Prompts, the order in which they are drawn, and batches of samples. All ranks hold the same data."""
