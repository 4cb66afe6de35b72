"""Estimate the memory of a run and the time of a step from its configuration: no model, no GPU, no other
rank."""
