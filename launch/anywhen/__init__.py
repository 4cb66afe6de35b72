"""Cuts a run into jobs that start now: `lockstep submit --anywhen`.

`command` is the door for the user, and `turns` the door for a job of the run. `decision` chooses the next
request from a view of the queue, without side effects. `record` keeps the plan and the requests in the run
directory, `queue` calls Slurm, and `turns` connects the three once a minute.
"""
