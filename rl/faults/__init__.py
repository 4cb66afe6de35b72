"""Faults: phase limits, heartbeats, comparisons between ranks, the first fault's report, the lock."""
