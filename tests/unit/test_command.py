"""The command `lockstep`: its table, one style of errors, the missing environment, and the library."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.commands import COMMANDS
from rl.config.options import flatten
from rl.config.schema import Config
from tests.spawn import ROOT
from tools import doctor


def run(*arguments, python=(sys.executable,)):
    command = [*python, "-m", "lockstep", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_every_word_leads_to_a_module_whose_main_takes_the_arguments():
    for words, command in COMMANDS.items():
        tree = ast.parse((ROOT / f"{command.module.replace('.', '/')}.py").read_text())
        (main,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
        assert main.args.args and command.help[0].isupper(), words
        assert flatten(Config()).keys() >= {*command.first}, words


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian"], "error: trian is no command of lockstep; did you mean train?"),
        (["status", "nowhere"], "error: there is no directory nowhere (working directory "),
        (["samples"], "error: the following arguments are required: RUN_DIR; lockstep samples --help"),
        (["recipes", "nope"], "error: recipe=nope does not exist"),
        (
            ["submit", "--config", "a.yaml", "--node", "2"],
            "error: unknown argument --node; did you mean --nodes?",
        ),
        (["data", "gsm8k", "--otu", "x"], "error: unknown argument --otu; did you mean --out?"),
        (
            ["samples", "x", "--score", "-1:0"],
            "error: the value of --score begins with -; write --score=-1:0",
        ),
        (["train", "--config", "configs/quickstart.yaml", "run.sed=1"], "error: Unknown key 'sed'"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(arguments, sentence):
    done = run(*arguments)
    assert done.returncode == 2 and done.stderr.startswith(sentence) and len(done.stderr.splitlines()) == 1


def test_without_the_environment_the_remedy_is_named():
    done = run("status", python=(sys.executable, "-S"))  # -S: without site-packages
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "has no package" in done.stderr and "source .venv/bin/activate" in done.stderr


@pytest.mark.parametrize("program", ["lockstep", "train_rl"])
def test_an_old_python_is_refused_in_one_sentence(program):
    old = f"import sys; sys.version_info = (3, 9); sys.argv = ['x', 'status']; import {program}"
    done = subprocess.run([sys.executable, "-c", old], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "is older than Python 3.11; activate" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_bash_completes_commands_and_keys():
    script = """source <("$0" -m lockstep completion)
        for line in "tr" "data to" "train training.optimizer.l" "train run.mode ="
        do COMP_WORDS=(lockstep $line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
           _lockstep; echo "${COMPREPLY[*]}"; done"""
    done = subprocess.run(
        ["bash", "-c", script, sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["train  trace ", "toy ", "training.optimizer.lr=", ""], done.stderr


def test_help_of_a_word_is_a_command_or_keys():
    assert run("help", "plan", "refit").stdout.startswith("usage: lockstep plan refit")
    assert "training.optimizer.clip_grad" in run("--help", "clip").stdout
    assert "checkpoint.resume=never" in run("--help", "eval").stdout


def test_a_run_can_be_read(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {name: a}\ntraining: {optimizer: {lr: 1e-6}}\n")
    (tmp_path / "status.json").write_text(json.dumps({"state": "stopped", "reason": "SIGTERM"}))
    steps = [{"training/global_step": n, "a": n / 2} for n in (0, 1)] + [{"training/global_step": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    found = lockstep.read_run(tmp_path)
    assert (found.state, found.reason, found.values("a")) == ("stopped", "SIGTERM", {0: 0.0, 1: 0.5})
    assert found.config["training"]["optimizer"]["lr"] == 1e-6
    assert found.checkpoints == {1: tmp_path / "checkpoints" / "step_000001"}
    with pytest.raises(FileNotFoundError, match="holds no run|no config.yaml"):
        lockstep.read_run(Path("nowhere"))


@pytest.mark.parametrize("tool", ["plan", "doctor"])
def test_tools_take_several_files(tool, tmp_path):
    (tmp_path / "a.yaml").write_text("run: {name: a, seed: 1}\n")
    (tmp_path / "b.yaml").write_text("run: {name: b, sede: 2}\n")
    gpus = ["--gpus", "1"] * (tool == "plan")
    done = run(tool, *gpus, "--config", tmp_path / "a.yaml", "run.seed=3", "--config", tmp_path / "b.yaml")
    assert done.returncode == 2 and "b.yaml" in done.stderr and "did you mean run.seed" in done.stderr


def test_training_refuses_an_invalid_configuration_with_its_sentence():
    with pytest.raises(ValueError, match="Unknown key 'sed'"):
        lockstep.train(ROOT / "configs" / "quickstart.yaml", {"run.sed": 1})


def test_a_command_as_the_value_of_an_option_is_no_file():
    command = "lockstep train --config my.yaml"
    assert doctor.parse(["--opened", command]).opened == command
