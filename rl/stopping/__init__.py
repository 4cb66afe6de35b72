"""Orderly stops: the events that request one, the deadlines of the job, and the ranks' agreement on it."""
