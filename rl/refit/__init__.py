"""Refit: copy policy weights from the training grid to the generation replicas, and check the copies."""
