"""Timelines of a run's steps, and the trace that is merged from them."""

import gzip
import json
from collections import defaultdict

import pytest

from tests.spawn import RanksFailed
from tests.toy import train, write_config
from tools import trace

SPANS = {
    "main": set(
        "step gen engine update_weights reward old_log_prob ref update_actor save_checkpoint agreement "
        "forward-compute backward-compute all-grads-sync optimizer".split()
    ),
    "phase": {"generate", "refit", "score", "log_probs", "update", "save", "other"},
    "reward worker 0": {"score a sample"},
    "checkpoint": {"write the checkpoint"},
}
KEYS = (
    "trace.steps=[2]",
    "trace.ranks=[1]",
    "trace.torch_profiler=[log_probs]",
    "objective.kl_coef=0.01",
    "checkpoint.every=1",
    "checkpoint.background=true",
)


def test_a_traced_step_shows_every_rank_on_one_clock(toy, tmp_path, capsys):
    records = train(2, write_config(tmp_path, toy, *KEYS))
    assert trace.main([str(tmp_path / "run"), "--torch"]) == 0
    assert "update_actor" in capsys.readouterr().out
    written = sorted(path.name for path in (tmp_path / "run" / "trace").glob("*"))
    ranks = [f"step_000002_rank_0000{rank}" for rank in range(2)]
    profiles = [f"{ranks[1]}.log_probs_{n}.pt.trace.json" for n in (1, 2)]  # old policy and reference
    assert written == sorted(["step_000002.json.gz", *(f"{name}.json" for name in ranks), *profiles])
    merged = json.loads(gzip.decompress((tmp_path / "run" / "trace" / written[0]).read_bytes()))
    tracks, spans = {}, defaultdict(list)
    for event in merged["traceEvents"]:
        if event["name"] == "thread_name":
            tracks[event["pid"], event["tid"]] = event["args"]["name"]
    for event in (event for event in merged["traceEvents"] if event["ph"] == "X"):
        spans[event["pid"], tracks[event["pid"], event["tid"]]].append(event)
    for rank in range(2):
        for track, names in SPANS.items():
            assert names <= {event["name"] for event in spans[rank, track]}
        assert_nested(spans[rank, "main"])
        (step,) = (event for event in spans[rank, "main"] if event["name"] == "step")
        assert step["dur"] / 1e6 == pytest.approx(records[1]["timing_s/step"], rel=0.5)
        forward = [event["args"] for event in spans[rank, "main"] if event["name"] == "forward-compute"]
        assert all(args["tokens"] > args["samples"] >= 0 for args in forward)
    # No rank leaves a comparison between ranks before the other has begun it.
    agreements = [[e for e in spans[rank, "main"] if e["name"] == "agreement"] for rank in range(2)]
    error = sum(rank["clock_error_ns"] for rank in map(json.loads, _texts(tmp_path, ranks))) / 1e3
    for one, other in zip(*agreements, strict=True):
        assert one["ts"] <= other["ts"] + other["dur"] + error
        assert other["ts"] <= one["ts"] + one["dur"] + error
    operators = [event for key, events in spans.items() if "torch.profiler" in key[1] for event in events]
    passes = [event for event in spans[1, "main"] if event["name"] in ("old_log_prob", "ref")]
    assert any(event["name"] == "aten::addmm" or "aten::mm" in event["name"] for event in operators)
    first, last = min(event["ts"] for event in passes), max(event["ts"] + event["dur"] for event in passes)
    inside = [event for event in operators if first <= event["ts"] <= last]
    assert len(inside) > 0.9 * len(operators)


def _texts(directory, ranks):
    return [(directory / "run" / "trace" / f"{name}.json").read_text() for name in ranks]


def assert_nested(events: list[dict]) -> None:
    """Assert that two spans of a thread are apart, or one contains the other; else viewers draw nonsense."""
    ends: list[float] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.01, event
        ends.append(event["ts"] + event["dur"])


def test_keys_that_need_a_gpu_are_refused_on_a_cpu(toy, tmp_path):
    with pytest.raises(RanksFailed) as failure:
        train(1, write_config(tmp_path, toy, "trace.steps=[1]", "trace.nvtx=true"))
    assert "trace.nvtx=true needs a GPU" in failure.value.stderr[0]
