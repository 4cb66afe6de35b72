"""Training with a model's own class in transformers, in place of Megatron's layers (`training.backend`)."""
