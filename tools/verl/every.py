"""Every example script of a checkout of verl, converted, with the dry run of its config."""

import contextlib
import io
import multiprocessing
import os
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rl.dry_run.command import main as dry_run
from tools.verl.convert import convert


@dataclass(frozen=True)
class Conversion:
    """The result of converting one script."""

    script: str
    world_size: int = 0
    """Number of GPUs of the script's settings, on which the config passes the dry run."""
    refusal: str = ""
    """Why there is no such config; "" if there is one."""


def convert_every(checkout: Path, out: Path, *, train_rows: int, gpu_memory_gib: float) -> list[Conversion]:
    """Convert all scripts in the folder examples of a checkout; write the configs that pass to `out`.

    A config passes if the dry run accepts it on the script's own number of GPUs of `gpu_memory_gib` GiB.
    Raises ValueError if the checkout has no scripts.
    """
    scripts = sorted(checkout.resolve().glob("examples/**/*.sh"))
    if not scripts:
        raise ValueError(f"--all={checkout}: a checkout of verl has scripts in {checkout}/examples.")
    out.mkdir(parents=True, exist_ok=True)
    one = partial(attempt, out=out.resolve(), train_rows=train_rows, gpu_memory_gib=gpu_memory_gib)
    with multiprocessing.get_context("fork").Pool(initializer=os.chdir, initargs=[checkout]) as pool:
        return pool.map(one, [script.relative_to(checkout.resolve()) for script in scripts], chunksize=1)


def attempt(script: Path, *, out: Path, train_rows: int, gpu_memory_gib: float) -> Conversion:
    """Convert one script and start the dry run. script: relative to the working directory.

    A name such as run_96gb.sh says the memory of the script's GPUs.
    """
    if named := re.search(r"_(\d+)gb", script.name):
        gpu_memory_gib = float(named[1])
    file = out / f"{'__'.join(script.with_suffix('').parts[1:])}.yaml"
    file.unlink(missing_ok=True)
    try:
        found = convert(script, train_rows=train_rows, gpu_memory_gib=gpu_memory_gib)
    except ValueError as error:
        return Conversion(str(script), refusal=one_line(str(error)))
    file.write_text(found.text)
    size, memory = f"--world-size={found.world_size}", f"--gpu-memory-gib={gpu_memory_gib}"
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        code = dry_run(["--config", str(file), "--dry-run", size, memory])
    if not code:
        return Conversion(str(script), found.world_size)
    file.unlink()
    text, _, unfitting = output.getvalue().partition("DOES NOT FIT")
    errors = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
    errors += [line for line in found.report.splitlines() if "was assumed, because the script" in line]
    return Conversion(str(script), refusal=one_line(unfitting or " ".join(errors)))


def one_line(text: str) -> str:
    return " ".join(text.split())
