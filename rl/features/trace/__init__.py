"""The timeline of a step."""
