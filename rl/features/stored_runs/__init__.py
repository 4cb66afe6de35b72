"""Runs over the stored rollouts of another run: training on them, or scoring them again."""
