"""Low-rank adapters: their layers in the trainer, their slots in an engine, and their files."""
