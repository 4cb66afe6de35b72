"""Runs on Slurm: batch files, submission, sweeps, state of runs. Works without torch and submitit."""
