"""Roles: some ranks of the job generate samples while the others train."""
