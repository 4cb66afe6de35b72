"""Finding and reporting faults: phase limits, heartbeats, comparisons between ranks, and the run's lock."""
