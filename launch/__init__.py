"""Runs on Slurm: batch files written and submitted, sweeps, what became of runs. Needs neither torch nor submitit to submit."""
