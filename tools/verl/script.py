"""A verl run's settings, from its script or its YAML."""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.verl.keys import OFF, RENAMED

PROGRAMS = ("python", "python3", "torchrun", "ray", "uv", "accelerate")
REPORT = """#!/bin/bash
[ "$1" = -c ] && exit 1 # a question about the machine, such as whether torch_npu is installed
printf '%s\\0' "$@" $'\\n' >> '{calls}'
"""
"""A program that writes its arguments to a file."""
FORGIVING = """
command_not_found_handle() { return 0; }
ulimit() { return 0; }
cd() { builtin cd "$@" 2>/dev/null || return 0; }
source() { [ ! -f "$1" ] || builtin source "$@"; }
"""
"""Definitions that a script's shell reads first, so that it works without the script's machine: its limits,
directories and environments."""
NUMBERS = r"NUM|SIZE|NODES|GPUS|NPUS|COUNT|RANK|WORLD"
"""Pattern of the names of variables that hold numbers."""


class Settings:
    """The settings of a verl run by dotted key; notes which of them were translated."""

    def __init__(self, given: dict[str, Any]):
        self.given = given
        self.used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting, or verl's default."""
        self.used.add(key)
        value = self.given.get(key)
        return default if value is None else value

    def first(self, *keys: str, default: Any = None) -> Any:
        """Return the first of these settings that is given, or verl's default."""
        values = [self.get(key) for key in keys]
        return next((value for value in values if value is not None), default)

    def rest(self) -> dict[str, Any]:
        """Return the settings that nothing read and that are not switched off."""
        return {key: value for key, value in self.given.items() if key not in self.used and value not in OFF}


def read_settings(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return verl's settings by dotted key. Raises ValueError if the file does not start verl."""
    if path.suffix in (".yaml", ".yml"):
        arguments, settings = list(overrides), flat(yaml.safe_load(path.read_text()))
    else:
        arguments, settings = arguments_of_script(path, overrides), {}
    for argument in arguments:
        key, is_setting, value = argument.lstrip("+~").partition("=")
        if is_setting and argument.startswith("--nproc"):  # torchrun's
            settings.setdefault("trainer.n_gpus_per_node", parse(value))
        elif is_setting and not argument.startswith("-"):
            settings[key] = parse(value)
    return {renamed(key): value for key, value in settings.items()}


def renamed(key: str) -> str:
    """Return the name that a setting had before verl moved it."""
    for pattern, name in RENAMED.items():
        key = re.sub(pattern, name, key)
    return key


def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key, without references such as ${a.b}."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found |= flat(value, f"{key}.")
        elif not (isinstance(value, str) and value.startswith("${")) and name != "_target_":
            found[key] = parse(value) if isinstance(value, str) else value
    return found


def parse(text: str) -> Any:
    """Return the value that Hydra gives to the text of an override."""
    try:
        value = yaml.safe_load(text.strip("'\""))
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-6 as a string
        except ValueError:
            return value
    return value


def arguments_of_script(path: Path, overrides: Sequence[str]) -> list[str]:
    """Return the arguments with which a script starts verl. Raises ValueError if it does not.

    A variable that the script requires and the environment lacks gets its name as its value, or 1 if the name
    is that of a number. A script that prints its usage gets 8 processes and a directory.
    """
    variables: dict[str, str] = {}
    positional: tuple[str, ...] = ()
    while True:
        calls, message = run_script(path, (*positional, *overrides), variables)
        for arguments in calls:
            if any(a.startswith("verl.trainer") or re.search(r"(^|[._/])main(_|$)", a) for a in arguments):
                return arguments
        required = re.search(r"line \d+: (\w+): (?!command|No such)", message)
        if required and required[1] not in variables:
            variables[required[1]] = "1" if re.search(NUMBERS, required[1]) else required[1]
        elif not positional and re.search("usage", message, re.IGNORECASE):
            positional = ("8", "checkpoints")
        else:
            last = (message.strip().splitlines() or ["no error"])[-1]
            raise ValueError(
                f"{path} did not start verl's trainer (bash: {last}); export the variables that it requires, "
                "or pass a file with the command alone."
            )


def run_script(
    path: Path, arguments: Sequence[str], variables: dict[str, str]
) -> tuple[list[list[str]], str]:
    """Run a script with programs that only report their arguments; return their calls and bash's output."""
    with tempfile.TemporaryDirectory() as directory:
        calls, programs, start = (Path(directory, name) for name in ("calls", "bin", "start"))
        programs.mkdir()
        for name in PROGRAMS:
            program = programs / name
            program.write_text(REPORT.format(calls=calls))
            program.chmod(0o755)
        start.write_text(FORGIVING)
        done = subprocess.run(
            ["/bin/bash", path.resolve(), *arguments],
            env=os.environ | variables | {"PATH": str(programs), "BASH_ENV": str(start)},
            cwd=directory,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        text = calls.read_text() if calls.exists() else ""
        text = text.replace(directory, os.getcwd())  # of paths that the script makes of its directory
    return [call.split("\0") for call in text.split("\n\0")], done.stdout + done.stderr
