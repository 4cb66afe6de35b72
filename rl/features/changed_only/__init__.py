"""Refits that send only changed elements."""
