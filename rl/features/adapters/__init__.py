"""Low-rank adapters: their layers in the trainer, their slots in an engine, and their files."""

import rl.training  # noqa: F401  adapts Megatron, which modules of this folder import
