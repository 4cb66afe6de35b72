"""The models of a run on this rank, their inputs, and their sharing of the memory."""
