"""Fault detection: phase limits, heartbeats, comparisons between ranks, the report of the first fault, the
directory's lock."""
