"""Checks that run in every step and find errors that no phase would notice.

The class `Checks` has one method for each moment of a step at which checks run.
"""
