"""The tokens from which the engine sampled, over which the trainer renormalises."""
