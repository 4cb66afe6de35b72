"""Durations as sbatch's --time takes them, and the end of the job."""

import pytest

from rl.config.durations import seconds_of
from rl.stopping.deadline import job_end


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("3:50:00", 13800),
        ("90", 5400),
        ("90:30", 5430),
        ("1-0", 86400),
        ("1-02:03", 93780),
        ("2-00:00:01", 172801),
        ("0:00:05", 5),
        ("100:00:00", 360000),
    ],
)
def test_every_form_of_sbatch_is_read(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["4h", "1:2:3:4", "-1", "1.5", "", "1-", "12:", " 5", "0", "0:00:00"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match=r"\d:\d0:00|must be positive"):
        seconds_of(text)


def test_the_end_of_the_job_is_what_the_environment_says():
    for value, end in (("1763770000", 1763770000.0), ("", None), ("UNLIMITED", None)):
        assert job_end({"SLURM_JOB_END_TIME": value}) == end
    assert job_end({}) is None
