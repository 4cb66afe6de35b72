import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tools import plan_refit

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "plan_refit.py"
MEASURED = """
import resource, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""
"""Program that runs a script and prints its peak memory in KiB to stderr."""

DENSE = dict(
    architectures=["Qwen2ForCausalLM"],
    num_hidden_layers=4,
    hidden_size=16,
    intermediate_size=24,
    vocab_size=200,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    tie_word_embeddings=True,
)


def test_the_table_of_a_published_model(capsys):
    plan_refit.main(
        [
            "--model",
            str(ROOT / "configs/models/qwen2.5-32b"),
            *"--train tp=8,pp=2 --rollout tp=4 --world-size 64".split(),
        ]
    )
    rows = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["received"] == rows["least possible"]
    parameters = 32.76e9
    assert float(rows["gathering every weight"][1]) == pytest.approx(
        parameters * 2 * 15 / 16 / 2**30, rel=0.001
    )
    # Each of 16 replicas of the engine is filled, by what stays and what comes.
    filled = float(rows["received"][3]) + float(rows["stays on the rank"][3])
    assert filled == pytest.approx(16 * parameters * 2 / 2**30, rel=0.001)
    assert 0 < float(rows["largest batch"][2]) <= 0.5
    assert float(rows["seconds, busiest rank"][0]) <= float(rows["seconds, batch by batch"][0])
    assert float(rows["seconds, gathering"][0]) == pytest.approx(8 * 61.43e9 / 400e9, rel=0.01)


def test_deepseek_on_a_thousand_ranks():
    options = "--train tp=8,pp=16,ep=32 --rollout tp=32 --world-size 1024".split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime  # of CPU time: other tests share the cores
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, SCRIPT, "--model", ROOT / "configs/models/deepseek-v3", *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60
    assert int(done.stderr.split()[-1]) < 4 << 20  # KiB
    rows = {
        line[:28].strip(): [float(word) for word in line[28:].split()]
        for line in done.stdout.splitlines()[1:10]
    }
    assert rows["received"] == rows["least possible"]
    assert 671.0e9 * 2 / 2**30 == pytest.approx(rows["gathering every weight"][2], rel=0.01)
    assert (
        rows["received"][0] > 671.0e9 * 2 / 32 / 2**30 * 0.97
    )  # a rank's part of an engine; the rank trains almost none of it
    assert (
        rows["sent to other nodes"][2] < 1.5 * rows["sent to other nodes"][1]
        and rows["largest batch"][2] <= 0.5
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "--train tp=3 --rollout tp=1 --world-size 8",
            "training.tp=3 times training.pp=1 is 3, which does not divide the world",
        ),
        ("--train tp=2 --rollout tp=16 --world-size 8", "rollout.tp=16 does not divide the world of 8 ranks"),
        ("--train tp=2 --rollout tp=3 --world-size 6", "rollout.tp=3 does not divide the model's"),
        ("--train tp=8 --rollout tp=1 --world-size 8", "training.tp=8 does not divide the model's"),
        ("--train tp=2,cp=2 --rollout tp=1 --world-size 8", "found cp=2, but it takes ep, etp, pp, tp"),
        ("--train tp=two --rollout tp=1 --world-size 8", "found tp=two"),
        ("--train tp=2,ep=2 --rollout tp=1 --world-size 8", "split experts, but no model"),
        ("--train pp=8 --rollout tp=1 --world-size 8", "training.pp=8 leaves stages without a layer"),
    ],
)
def test_invalid_layouts_are_refused_in_one_line(tmp_path, arguments, message, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with pytest.raises(SystemExit, match=re.escape(message)):
        plan_refit.main(["--model", str(tmp_path / "config.json"), *arguments.split()])
