"""The sets of tokens that the engine sampled from; the trainer renormalises over them."""
