"""Experts of the engine's tokens, which the trainer uses again."""
