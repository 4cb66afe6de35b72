"""Prompts, the order in which they are drawn, and batches; identical on all ranks."""
