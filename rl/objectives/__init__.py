"""Advantages, policy losses, KL and aggregation: pure functions of tensors.

They read no config and call no collectives.
"""
