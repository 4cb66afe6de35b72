"""Lockstep: reinforcement learning on large language models as one SPMD program."""

__version__ = "0.1.0"
