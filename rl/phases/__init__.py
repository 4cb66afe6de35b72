"""The phases that an algorithm is written in."""
