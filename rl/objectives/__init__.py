"""Advantages, policy losses, KL and aggregation: pure functions of tensors, without config and without
collectives."""
