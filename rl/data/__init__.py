"""Prompts, the order in which they are drawn, and how sequences become batches; identical on all ranks."""
