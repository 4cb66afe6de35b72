import io

import pytest

from rl.run_directory import progress as module
from rl.run_directory.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def screen(self):
        """Return the visible text, after carriage returns and without trailing blanks."""
        rows = []
        for row in self.getvalue().split("\n"):
            seen = ""
            for part in row.split("\r"):
                seen = part + seen[len(part) :]
            rows.append(seen.rstrip())
        return rows


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


def test_terminal_shows_a_bar_that_disappears():
    stream = Terminal()
    with Progress(True, stream).phase("gen", 4, "samples") as counter:
        counter.update(1)
    assert "gen" in stream.getvalue() and "/4" in stream.getvalue()
    assert stream.screen() == [""]


def test_bar_disappears_when_the_phase_raises():
    stream = Terminal()
    with pytest.raises(RuntimeError):
        with Progress(True, stream).phase("gen", 4, "samples"):
            raise RuntimeError
    assert stream.screen() == [""]


def test_line_on_a_terminal_stands_whole_above_the_bar():
    stream = Terminal()
    progress = Progress(True, stream)
    with progress.phase("gen", 4, "samples") as counter:
        counter.update(1)
        progress.line("step 1/10")
        assert stream.screen()[0] == "step 1/10" and "gen" in stream.screen()[1]
    assert stream.screen() == ["step 1/10", ""]


def test_line_in_a_log_is_printed_as_it_is():
    stream = io.StringIO()
    Progress(True, stream).line("step 1/10")
    assert stream.getvalue() == "step 1/10\n"


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_disabled_writes_nothing_and_has_the_same_interface(stream, clock):
    progress = Progress(False, stream)
    with progress.phase("gen", 4, "samples") as counter:
        clock.now += 100
        counter.update(1)
        counter.update()
    progress.line("step 1/10")
    assert stream.getvalue() == ""


def test_default_stream_is_stderr(capsys):
    Progress(True).line("hello")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")
