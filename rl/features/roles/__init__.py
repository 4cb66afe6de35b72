"""Ranks that generate while others train."""
