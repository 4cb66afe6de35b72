"""Orderly stops: the events that request one, the deadlines of the job, and the ranks' agreement on it.

A run that stopped and is to be continued ends with exit code 75 (`requests.STOPPED_EXIT`, EX_TEMPFAIL of
sysexits.h): the same command continues it from its newest checkpoint.
"""
