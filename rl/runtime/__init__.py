"""Ranks, their rendezvous, torch.distributed's process groups, the device, and shared collectives."""
