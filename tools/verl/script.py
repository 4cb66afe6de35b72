"""A verl run's settings, from its script or its YAML."""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tools.verl.keys import LEGACY_TUNING, OFF, RENAMED

PROGRAMS = (
    *("python", "python3", "torchrun", "ray", "uv", "accelerate"),
    *("srun", "mpirun", "env", "nohup", "numactl", "timeout"),  # start one of the others
)
REPORT = """#!/bin/bash
[ "$1" = -c ] && exit 1 # a question about the machine, such as whether torch_npu is installed
printf '%s\\0' "$@" $'\\n' >> '{calls}'
"""
"""A program that writes its arguments to a file."""
FORGIVING = """
command_not_found_handle() { [ ! -p /dev/stdin ] || while read -r; do :; done; return 0; }
ulimit() { return 0; }
cd() { builtin cd "$@" 2>/dev/null || return 0; }
source() { [ ! -f "$1" ] || builtin source "$@"; }
"""
"""Definitions that a script's shell reads first, so that it works without the script's machine: its limits,
directories and environments. A program that is not here reads its pipe to the end, so that the one before it
is not ended."""
NEEDED = ("actor_rollout_ref.model.path", "data.train_files")
"""Settings without which there is no run."""
NUMBERS = r"(?i)NUM|SIZE|NODES|GPUS|NPUS|COUNT|RANK|WORLD|STEPS|EPOCHS"
"""Pattern of the names of variables that hold numbers."""
STARTS = r"^(verl(_\w+)?\.(trainer|experimental|launch)|[^=]*(?<![^._/])main(_|$|\.py$)[^=]*$)"
"""Pattern of an argument with the name of a program that trains."""
OWN_CONFIGS = r"^(\w*ppo\w*_trainer|sft_trainer\w*|generation|evaluation)$"
"""Pattern of the names of configs that verl itself has."""


class VerlSettings:
    """The settings of a verl run by dotted key; notes which of them were translated."""

    def __init__(self, given: dict[str, Any]):
        self.given = given
        self.used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting, or verl's default. Raises ValueError for a text where the default is a number."""
        self.used.add(key)
        value = self.given.get(key)
        if isinstance(value, str) and isinstance(default, int | float) and not isinstance(default, bool):
            raise ValueError(f"{key}={value} must be a number; its default is {default}.")
        return default if value is None else value

    def first(self, *keys: str, default: Any = None) -> Any:
        """Return the first of these settings that is given, or verl's default."""
        values = [self.get(key) for key in keys]
        return next((value for value in values if value is not None), default)

    def rest(self) -> dict[str, Any]:
        """Return the settings that nothing read and that are not switched off."""
        return {key: value for key, value in self.given.items() if key not in self.used and value not in OFF}


def read_settings(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return verl's settings by dotted key, and notes. Raises ValueError if the file does not start verl."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; name a script or config of verl.")
    if path.suffix in (".yaml", ".yml"):
        settings = settings_of(overrides, settings_of_yaml(path))
        if any(key.startswith(("run.", "training.", "rollout.")) for key in settings):
            raise ValueError(f"{path} is a config of Lockstep; name a script or config of verl.")
        return settings, []
    arguments, notes = arguments_of_script(path, overrides)
    arguments += overrides  # of a script without "$@" too
    settings = settings_of(arguments, settings_of_config(arguments))
    if empty := [key for key in NEEDED if key in settings and settings[key] in OFF]:
        with suppress(ValueError):  # perhaps from a variable that the script never sets
            arguments, assumed = arguments_of_script(path, overrides, "-u")
            found = settings_of(arguments)
            empty = [key for key in empty if key in found]  # bash -u may take another branch
            settings |= {key: found[key] for key in empty}
            values = [str(found[key]) for key in empty]
            notes += [note for note in assumed if any(note.partition("=")[0] in value for value in values)]
    return settings, notes


def settings_of(arguments: Sequence[str], settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a command line, over its config's settings."""
    settings = dict(settings or {})
    options = launch_options(arguments)
    for option, key in {"nproc-per-node": "trainer.n_gpus_per_node", "nnodes": "trainer.nnodes"}.items():
        if options.get(option, "").isdigit():
            settings.setdefault(key, int(options[option]))
    if any(argument.endswith("fsdp_sft_trainer") for argument in arguments):
        settings = LEGACY_TUNING | settings
    if "megatron" in options.get("config-name", ""):
        settings.setdefault("model_engine", "megatron")
    programs = [place for place, argument in enumerate(arguments) if re.search(STARTS, argument)]
    for argument in arguments[programs[0] if programs else 0 :]:
        key, is_setting, value = argument.lstrip("+~").partition("=")
        if argument.startswith("~"):
            settings.pop(key, None)  # Hydra removes it
        elif is_setting and not argument.startswith("-"):
            settings[key] = parse(value)
    return {renamed(key): value for key, value in settings.items()}


def launch_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options of torchrun and Hydra by name without dashes; --name=value or --name value."""
    options = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument.startswith("--"):
            name, has_value, value = argument[2:].partition("=")
            options[name.replace("_", "-")] = value if has_value else following
    return options


def settings_of_config(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the config that a command line names, {} if verl has it.

    Raises ValueError if it is the script's own and not here.
    """
    options = launch_options(arguments)
    name = options.get("config-name", "ppo_trainer").removesuffix(".yaml")
    file = Path(options.get("config-path", "."), f"{name}.yaml")
    if file.is_file():
        return settings_of_yaml(file)
    if re.search(OWN_CONFIGS, name):
        return {}
    raise ValueError(
        f"--config-name={name}: the script's settings begin with {file}, which is not here; call this tool "
        "in the directory in which the script is called."
    )


def settings_of_yaml(file: Path) -> dict[str, Any]:
    """Return the settings of a config. Raises ValueError if it is not one."""
    try:
        tree = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not a config in YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{file} has no settings; it must be a mapping in YAML.")
    base = str(tree.pop("defaults", ""))
    return ({"model_engine": "megatron"} if "megatron" in base else {}) | flat(tree)


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
    quoted = re.fullmatch(r"(['\"])(.*)\1", text, re.DOTALL)
    text = quoted[2] if quoted else text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-6 as a string
        except ValueError:
            return text  # here # begins no comment
    return value


def arguments_of_script(path: Path, overrides: Sequence[str], *options: str) -> tuple[list[str], list[str]]:
    """Return the arguments with which a script starts verl, and notes. Raises ValueError if it does not.

    options: of bash.
    A variable that the script requires and the environment lacks gets its name as its value, or 1 if the name
    means a number, for example NUM_GPUS. A script that prints its usage gets 8 processes and a directory.
    """
    variables: dict[str, str] = {}
    positional: tuple[str, ...] = ()
    while True:
        calls, message = run_script(path, (*positional, *overrides), variables, *options)
        starts = [call for call in calls if any(re.search(STARTS, argument) for argument in call)]
        if starts:
            break
        required = re.search(r"line \d+: (\w+): (?!command|No such)", message)
        if required and required[1] not in variables:
            variables[required[1]] = "1" if re.search(NUMBERS, required[1]) else required[1]
        elif not positional and re.search("usage", message, re.IGNORECASE):
            positional = ("8", "checkpoints")
        else:
            lines = [line for line in message.strip().splitlines() if not line.startswith("+")]
            needs = f"; it requires the variables {', '.join(variables)}" if variables else ""
            raise ValueError(
                f"{path} did not start verl's trainer (bash: {(lines or ['no error'])[-1]}){needs}; export "
                "the variables that it requires, or pass a file with the command alone."
            )
    notes = [
        f"{name}={value} was assumed, because the script requires it; export its value."
        for name, value in variables.items()
    ]
    if any(start != starts[0] for start in starts):
        notes.append(f"The script starts verl {len(starts)} times; the first start is translated.")
    return starts[0], notes


def run_script(
    path: Path, arguments: Sequence[str], variables: dict[str, str], *options: str
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
            ["/bin/bash", *options, path.resolve(), *arguments],
            env=os.environ | variables | {"PATH": str(programs), "BASH_ENV": str(start)},
            cwd=directory,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
        text = calls.read_text(errors="replace") if calls.exists() else ""
        text = text.replace(directory, os.getcwd())  # of paths that the script makes of its directory
    return [call.split("\0") for call in text.split("\n\0")], done.stdout + done.stderr
