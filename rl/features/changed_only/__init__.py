"""Refits in which only the elements that changed travel."""
