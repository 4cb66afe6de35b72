"""Prompts, the order in which they are drawn, and how sequences become batches; alike on every rank."""
