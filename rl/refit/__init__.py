"""Move policy weights from the training grid to the generation replicas, and check that they arrived."""
