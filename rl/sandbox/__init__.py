"""Runs untrusted programs with limits on time, memory, files and system calls."""
