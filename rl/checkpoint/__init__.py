"""Checkpoints of a run, sharded and layout-free, and export to Hugging Face format."""
