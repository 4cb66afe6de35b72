"""Random edits of the shipped configurations: keys, values and the bytes of the file."""

import json
import random
from pathlib import Path

import yaml

from rl.config.checks import check
from rl.config.command_line import parse_command_line
from rl.config.options import flatten, to_yaml
from rl.config.schema import Config, derived_keys, load_config
from rl.config.sweep_checks import load_points
from rl.run_directory.named_metrics import check_named_metrics
from tests.fuzz.cases import Case, Silent
from tests.spawn import ROOT

SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if "expected" not in path.parts)
KEYS = sorted(flatten(Config()))
VALUES = (
    *(
        "0",
        "1",
        "-1",
        "2",
        "3",
        "7",
        "1e9",
        "1e-30",
        "0.5",
        "1e400",
        "-0.0",
        ".nan",
        ".inf",
        "-.inf",
        "10" * 200,
    ),
    *(
        "true",
        "false",
        "null",
        "~",
        "yes",
        "off",
        "''",
        "' '",
        "auto",
        "none",
        "never",
        "engine",
        "full",
        "on",
    ),
    *(
        "[]",
        "{}",
        "[1]",
        "[[]]",
        "{a: 1}",
        "[a, b]",
        "{a: {b: [c]}}",
        "[null]",
        "[1.5, x]",
        "{1: 2}",
        "[true]",
    ),
    *(
        "&a [*a]",
        "*a",
        "!!python/object:os.system x",
        "a: b: c",
        "[",
        "{",
        "'",
        '"',
        "%",
        "@x",
        "`x`",
        "|",
        ">",
        "- a",
    ),
    *("2026-11-28", "12:30:45", "0x10", "0o17", "1_000", "1e3", "+1", "1.", ".5", "01", "\u0661", "\u00bd"),
    *(
        "~/runs",
        "$HOME/x",
        "/proc/x",
        "/dev/null",
        "a b",
        "a=b",
        "a,b",
        "a#b",
        "a: b",
        "../..",
        "\\n",
        "\\",
        "x" * 2000,
    ),
    *(
        "rl.rewards.exact:score",
        "rl.rewards.nope:score",
        "nope.py:f",
        "os:system",
        ":",
        "a:",
        ":b",
        "rl.rewards.exact",
    ),
    *(
        "lora",
        "grpo",
        "ppo",
        "sft",
        "dpo",
        "cosine",
        "token-mean",
        "k3",
        "gae",
        "bfloat16",
        "float16",
        "0-0",
        "1-3",
    ),
    *("\x00", "\ud800", "\u202e", "\U0001f600", "\r", "\x1b[31m", "{{x}}", "{0}", "%s", "'; rm -rf x"),
)


def case(rng: random.Random, directory: Path) -> Case:
    source = rng.choice(SHIPPED)
    form = rng.randrange(5)
    if form == 0:
        return _bytes(rng, source, directory)
    overrides = [_override(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    if form == 1:
        overrides = [_misspelt(rng, text) for text in overrides]
    config = str(source.relative_to(ROOT))
    if form == 2:
        tree = yaml.safe_load(source.read_text())
        path = directory / "edited.yaml"
        for text in overrides:
            key, _, value = text.partition("=")
            _set(tree, key.split("."), value if rng.random() < 0.3 else _parsed(value))
        try:
            path.write_text(yaml.dump(tree, allow_unicode=True))
        except Exception:  # YAML has no form for the value, such as a lone surrogate
            path.write_text(json.dumps(tree))
        return Case(f"{config} with {overrides!r:.200} in the file", lambda: _load(str(path), []))
    return Case(f"{config} {overrides!r:.300}", lambda: _load(str(source), overrides))


def _override(rng: random.Random) -> str:
    return f"{rng.choice(KEYS)}={rng.choice(VALUES)}"


def _misspelt(rng: random.Random, text: str) -> str:
    place = rng.randrange(max(1, text.index("=")))
    return (
        text[:place] + rng.choice(("", ".", "x", "-", " ", "=", "[0]", "\u00e9", "\x00")) + text[place + 1 :]
    )


def _set(tree, path: list[str], value) -> None:
    for name in path[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[path[-1]] = value


def _parsed(text: str):
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _bytes(rng: random.Random, source: Path, directory: Path) -> Case:
    content = bytearray(source.read_bytes())
    edits = []
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(content))
        kind = rng.randrange(4)
        if kind == 0:
            content[place] = rng.randrange(256)
        elif kind == 1:
            del content[place : place + rng.randrange(1, 30)]
        elif kind == 2:
            content[place:place] = rng.choice(
                (b"\t", b"\n  ", b": ", b"[", b"{", b"&x ", b"*x", b"\xff", b"\x00", b"---\n", b"- ")
            )
        else:
            content[place:place] = content[place : place + 60]
        edits.append(kind)
        if not content:
            content = bytearray(b"\n")
    path = directory / "edited.yaml"
    path.write_bytes(bytes(content))
    return Case(f"{source.name} with edits {edits} of its bytes", lambda: _load(str(path), []))


def _load(path: str, overrides: list[str]) -> str:
    """Do what `train_rl.py` does with a command line before it imports torch."""
    try:
        command = parse_command_line(Config, ["--config", path, *overrides], description="")
    except SystemExit as error:
        if error.code == 2:
            raise ValueError("the command line is refused with its usage") from None
        raise
    config = load_config(command.config, command.overrides)
    points = load_points(command.config, command.overrides) if config.sweep.is_on else []
    check(config, points)
    check_named_metrics(config, points)
    derived_keys(command.config, command.overrides)
    again = _round_trip(config)
    if again != to_yaml(config):
        raise Silent("the printed configuration is read as another one")
    return "a valid configuration"


def _round_trip(config: Config) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(to_yaml(config))
        file.flush()
        return to_yaml(load_config(file.name))
