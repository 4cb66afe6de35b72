"""Arithmetic that makes the log-probs of trainer and engine bitwise equal (`model.numerics=bitwise`)."""

import rl.training  # noqa: F401  adapts Megatron, which modules of this folder import
