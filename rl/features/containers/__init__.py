"""Containers for environments and for the tests of programs, without root."""
