"""Estimates of a run's memory and step time from its configuration, without a model or a GPU."""
