"""Models that see: the vision tower in training, the positions of its tokens, and the engine's images."""
