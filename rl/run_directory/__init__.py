"""The files of a run directory: what ran, its status and its metrics."""
