"""Draft tokens of a small model or of the policy's own head, and the training of this head."""
