"""Models from which the policy learns token by token."""
