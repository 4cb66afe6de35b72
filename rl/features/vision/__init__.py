"""Models that see: the vision tower in training, the positions of its tokens, and the engine's images."""

import rl.training  # noqa: F401  adapts Megatron, which modules of this folder import
