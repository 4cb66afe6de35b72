"""Low-rank adapters: what they add to the trainer, in which slots an engine holds them, and their files."""
