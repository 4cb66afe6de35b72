"""Checks that run in every step and find errors that no phase would notice."""
