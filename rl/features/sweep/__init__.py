"""Several points of a sweep in one job, with one base model and one engine."""
