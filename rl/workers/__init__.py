"""Worker processes that run users' code: their start, their messages, and their end with all descendants."""
