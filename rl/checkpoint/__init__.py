"""Checkpoints of a run, sharded and free of the layout, and export to Hugging Face format."""

import rl.training  # noqa: F401  (prepares Megatron for a host without CUDA, before a module here imports it)
