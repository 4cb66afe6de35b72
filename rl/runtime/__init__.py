"""What a run needs around the algorithm: ranks, agreement, signals, metrics, progress."""
