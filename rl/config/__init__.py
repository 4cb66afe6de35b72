"""The configuration tree, where it comes from, and what it must satisfy. Needs neither torch nor Megatron nor
vLLM."""
