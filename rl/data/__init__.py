"""Prompts, their order, and batches; identical on all ranks."""
