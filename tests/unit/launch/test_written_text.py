"""A text keeps its value from the override through config, sweep, generated script and bash to the rank."""

import os
import shlex
import string
import subprocess
from pathlib import Path

import pytest

from launch.batch_file import Resources
from launch.points import SweepRun
from launch.schedulers import SCHEDULERS
from launch.sweep import SweepFile, write_points
from rl.config.options import ConfigError, as_override, flatten, read_override
from rl.config.paths import literal
from rl.config.schema import load_config

CHARACTERS = [*(set(string.printable) - set("\t\n\r\x0b\x0c")), "\u00e9", "\u4e2d", "\U0001f600"]
TEXTS = [
    f"{a}{c}{b}" for c in sorted(CHARACTERS) for a, b in (("a", "b"), ("a ", " b"), ("", "b"), ("a", ""))
]
TEXTS += [
    "a #b",
    "- a",
    "a: b",
    "[x]",
    "{a: 1}",
    "'a' \"b\"",
    "it's",
    "42",
    "1e-6",
    "true",
    "--a",
    "&a b",
    "*a",
]
TEXTS += ["a\\nb", "$(touch x)", "`touch x`", "!!str 5", "%j", "a;b|c&d", "$a ${", "a,b=c", '"q"', "'q'"]
KEYS = ("run.name", "model.path", "data.train", "reward.kwargs.x", "rollout.stop")


def value_of(override: str) -> object:
    key, config = override.partition("=")[0], load_config(None, [override])
    if key == "reward.kwargs.x":
        return config.reward.kwargs["x"]
    found = flatten(config)[key]
    return found[0] if isinstance(found, list) else found


def is_own(key: str, text: str) -> bool:
    """Return whether the text is taken as it stands: a path may begin with the home of a user."""
    return key not in ("model.path", "data.train") or not text.startswith("~")


@pytest.mark.parametrize("key", KEYS)
def test_a_text_written_by_launch_is_read_back(key):
    wrong = [text for text in TEXTS if is_own(key, text) and value_of(as_override(key, text)) != text]
    assert not wrong


@pytest.mark.parametrize("key", ("run.name", "model.path", "data.train", "rollout.stop"))
def test_a_text_on_the_command_line_means_itself(key):
    whole = ('"q"', "'q'")  # quotes around all of a text are YAML's
    lists = ("[b", "[x]") if key in ("data.train", "rollout.stop") else ()
    texts = [text for text in TEXTS if text not in (*whole, *lists) and is_own(key, text)]
    wrong = [text for text in texts if text != "~" and value_of(f"{key}={text}") != text]
    assert not wrong
    assert value_of(f"{key}='q: #1'") == "q: #1"


@pytest.mark.parametrize(
    "key",
    ["run.name", "data.train", "reward.kwargs", "reward.kwargs.x", "reward.sources", "training", "run.seed"],
)
@pytest.mark.parametrize("text", ["&a [*a]", "&a {x: *a}", "!!set {a}", "[*a]", "--- [a]", "{a: &b 1}"])
def test_marks_of_yaml_are_refused_with_their_key(key, text):
    with pytest.raises(ConfigError, match=rf"override '{key}=.*anchors, aliases, tags and documents of YAML"):
        load_config(None, [f"{key}={text}"])


def test_an_anchor_within_itself_is_refused_in_a_file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("reward: {kwargs: {x: &a [1, *a]}}\n")
    with pytest.raises(ConfigError, match="a.yaml, line 1: the anchor 'a' contains itself"):
        load_config(str(path))
    path.write_text("reward: {kwargs: {x: &a [1], y: *a}}\n")
    assert load_config(str(path)).reward.kwargs == {"x": [1], "y": [1]}


def test_the_home_and_variables_in_paths_are_replaced_or_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", "/s c")
    monkeypatch.setenv("HOME", "/home/me")
    assert value_of("model.path=~/m") == "/home/me/m"
    assert load_config(None, ["data.train=[$SCRATCH/a_$SCRATCH, '${SCRATCH}b']"]).data.train == [
        "/s c/a_/s c",
        "/s cb",
    ]
    assert load_config(None, ["run.dir=$SCRATCH/r"]).run.dir == "/s c/r"
    sources = load_config(None, ["reward.sources={a: {function: '~/f.py:g', kwargs: {path: ~/x}}}"]).reward
    assert sources.sources["a"] == {"function": "/home/me/f.py:g", "kwargs": {"path": "~/x"}}
    assert load_config(None, [f"run.dir={literal('/a$SCRATCH/${B}$c$1')}"]).run.dir == "/a$SCRATCH/${B}$c$1"
    assert value_of("run.name=~$SCRATCH") == "~$SCRATCH"  # a name is no path
    for text, why in (
        ("$SCRATHC/a", "SCRATHC is not set"),
        ("~nobody-x/a", "no user nobody-x; write ./~nobody"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_config(None, [f"run.dir={text}"])


def words_of(script: str, directory: Path, scheduler: str) -> list[str]:
    """Run a generated script with bash; return the arguments that it hands to slurm/."""
    fake = directory / "root" / "slurm"
    fake.mkdir(parents=True, exist_ok=True)
    (fake / "job.sh").write_text("say() { :; }; train() { printf '%s\\0' \"$@\"; }\n")
    (fake / f"train.{scheduler}").write_text("printf '%s\\0' \"$@\"\n")
    root = shlex.quote(str(Path(__file__).resolve().parents[3]))
    script = script.replace(f"LOCKSTEP_ROOT={root}", f"LOCKSTEP_ROOT={shlex.quote(str(directory / 'root'))}")
    env = os.environ | {"SLURM_ARRAY_TASK_ID": "0", "PBS_ARRAY_INDEX": "0", "LSB_JOBINDEX": "1", "POINT": "0"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_generated_scripts_hand_on_every_character(scheduler, tmp_path):
    here = tmp_path / 'it\'s $HOME #1 "x" `a`, 100% [b]: c=d\u00e9'
    here.mkdir()
    overrides = [as_override("reward.kwargs.x", text) for text in TEXTS] + [
        f"run.name={text}" for text in TEXTS
    ]
    resources = Resources(scheduler=scheduler, gpus_per_node=0, ranks_per_node=1)
    files = [str(here / "c.yaml"), "/b.yaml"]
    own = dict(name="it's $x #1", logs=here, configs=files, command="lockstep 'x #'")
    text = SCHEDULERS[scheduler].render(resources, overrides=overrides, **own)
    assert words_of(text, here, scheduler) == [*files, *overrides]
    points = here / "points"
    points.mkdir()
    (points / "0").write_text("\n".join(overrides) + "\n")
    more = dict(points=points, tasks=[0], at_a_time=0)
    text = SCHEDULERS[scheduler].render_sweep(resources, **own, **more)
    assert words_of(text, here, scheduler) == [*files, *overrides]
    line = SCHEDULERS[scheduler].command(here / "job", name="a")
    assert str(here / "job") in shlex.split(line.replace("<", ""))


def test_points_of_a_sweep_keep_their_values(tmp_path):
    values = [text for text in TEXTS if not text.startswith("~")]
    sweep = SweepFile(name="s", config="c", overrides={"reward.kwargs.y": "42"}, grid={"model.path": values})
    points = [SweepRun(f"p{number}", {"reward.kwargs": {"x": text}}) for number, text in enumerate(values)]
    tmp_path /= "it's $HOME"
    written = write_points(sweep, tmp_path, points)
    for task, (point, text) in enumerate(zip(written, values, strict=True)):
        lines = (tmp_path / "launch" / "points" / str(task)).read_text().splitlines()
        config = load_config(None, lines)
        assert config.reward.kwargs == {"x": text} and config.run.name == point.name
        assert config.run.dir == str(tmp_path / point.name)
        assert [read_override(line).key for line in lines[:1]] == ["reward.kwargs.y"]
