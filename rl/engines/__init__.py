"""The models of a run on this rank, what they are built from, and how they share the memory."""
