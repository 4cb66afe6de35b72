"""Trajectories of many turns: environments and tools, which live in worker processes."""
