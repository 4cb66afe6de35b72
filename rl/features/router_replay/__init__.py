"""Experts of the engine's tokens, which the trainer uses again."""

import rl.training  # noqa: F401  adapts Megatron, which modules of this folder import
