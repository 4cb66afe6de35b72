"""Draft tokens of a small model or of the policy's own head, and the training of this head."""

import rl.training  # noqa: F401  adapts Megatron, which modules of this folder import
