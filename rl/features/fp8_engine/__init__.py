"""An engine with weights in FP8, and its refits."""
