"""Faults: found, named, and shared by all ranks."""
