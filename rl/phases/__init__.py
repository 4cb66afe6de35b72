"""The phases of a step, which an algorithm's file calls."""
