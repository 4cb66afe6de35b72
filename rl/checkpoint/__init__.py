"""Checkpoints of a run, sharded and independent of the layout, and export to Hugging Face format."""

import rl.training  # noqa: F401  (adapts Megatron to a host without CUDA before its first import)
