"""Moving policy weights from the training grid to the generation replicas, and checking that they arrived."""
