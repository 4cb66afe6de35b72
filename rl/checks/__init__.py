"""Checks that run in every step, for errors that no phase notices. `Checks` has its four moments."""
