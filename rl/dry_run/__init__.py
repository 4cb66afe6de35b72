"""What a run would need and how long a step would take, from its configuration alone: no model, no GPU, no other rank."""
