"""Checks that run in every step, for errors that no phase notices. `Checks` lists their moments."""
