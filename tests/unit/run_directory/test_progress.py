import io

import pytest

from rl.run_directory import progress as module
from rl.run_directory.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def test_log_gets_a_line_at_most_every_ten_seconds_per_phase(clock):
    stream = io.StringIO()
    with Progress(True, stream).phase("gen", 512, "samples") as counter:
        for _ in range(256):
            counter.update(2)
            clock.now += 0.125
    assert stream.getvalue().splitlines() == [
        f"gen {done}/512 samples, {seconds} s" for done, seconds in ((162, 10), (322, 20), (482, 30))
    ]
    assert "\r" not in stream.getvalue()


def test_phases_keep_their_own_time_and_count(clock):
    stream = io.StringIO()
    progress = Progress(True, stream)
    with progress.phase("gen", None, "samples") as outer:
        clock.now += 6
        outer.update(3)
        with progress.phase("reward", 8, "samples") as inner:
            clock.now += 6
            inner.update()
            outer.update()
            clock.now += 5
            inner.update()
    assert stream.getvalue().splitlines() == ["gen 4 samples, 12 s", "reward 2/8 samples, 11 s"]


def test_short_phase_leaves_no_trace_in_a_log(clock):
    stream = io.StringIO()
    with Progress(True, stream).phase("adv", 4, "samples") as counter:
        counter.update(4)
    assert stream.getvalue() == ""


def test_terminal_shows_counts_and_curves(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = Progress(True, stream, name="toy", max_steps=10)
    for step, reward in enumerate((0.1, 0.4, 0.8), 1):
        slowest = {"perf/slowest_rank": 3, "perf/slowest_rank_late_s": 1.5}
        progress.record(step, {"critic/score/mean": reward, "timing_s/step": 60.0} | slowest)
    with progress.phase("step 4 gen", 4, "samples") as counter:
        clock.now += 2.0
        counter.update(1)
    text = stream.getvalue()
    assert (
        "toy" in text
        and "step 3/10, 60 s each, 7 min left" in text
        and "1/4 samples, 0.5/s, 6 s left" in text
    )
    assert "slowest in step 3: rank 3, 1.5 s after the first" in text
    assert "\u2581\u2584\u2588" in text  # the lowest, the middle and the highest of eight levels


def test_line_on_a_terminal_stays_above_the_view():
    stream = Terminal()
    progress = Progress(True, stream, name="toy")
    with pytest.raises(RuntimeError):
        with progress.phase("gen", 4, "samples"):
            progress.line("step 1/10 [b]")
            raise RuntimeError
    progress.line("after")
    text = stream.getvalue()
    assert text.index("step 1/10 [b]\n") < text.rindex("toy") < text.index("after\n")


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_disabled_writes_nothing_and_has_the_same_interface(stream, clock):
    progress = Progress(False, stream)
    with progress.phase("gen", 4, "samples") as counter:
        clock.now += 100
        counter.update(1)
        counter.update()
    progress.line("step 1/10")
    assert stream.getvalue() == ""


def test_lines_of_a_log_are_printed_as_they_are_to_stderr(capsys):
    Progress(True).line("step 1/10")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "step 1/10\n")
