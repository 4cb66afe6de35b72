"""Accept a GPU machine: test and measure the program on it, and report the results.

    python tools/gpu_acceptance.py                   all stages; on one GPU 30 to 40 minutes
    python tools/gpu_acceptance.py --quick           5 to 8 minutes
    python tools/gpu_acceptance.py --stage speed     one stage again, into the same page
    python tools/gpu_acceptance.py --from resume     this stage and those after it, into the same page
    python tools/gpu_acceptance.py --rehearse        the same stages on a CPU with tiny sizes

The times are estimates. Every stage runs in its own processes with a time limit below ten minutes. The next
stage runs even if a stage fails. index.html and acceptance.json in --out contain every stage that has run.
Exit codes: 0, no stage failed; 1, a stage failed; 2, there is no GPU.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Python searches only tools/ for modules when it runs this file as a script.
sys.path.insert(0, str(ROOT))

from tools.acceptance.page import page  # noqa: E402
from tools.acceptance.stages import Stage, all_stages  # noqa: E402
from tools.processes import kill_tree  # noqa: E402

REHEARSAL_FACTOR = 3
"""Factor of the time limits in a rehearsal, where imports and the start of vLLM take longer."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    out = Path(args.out).resolve()
    (out / "stages").mkdir(parents=True, exist_ok=True)
    mode = "rehearse" if args.rehearse else "quick" if args.quick else "full"
    ranks = num_ranks(mode)
    if not args.rehearse and not ranks:
        print("error: nvidia-smi lists no GPU; use --rehearse to run on the CPU.", file=sys.stderr)
        return 2
    failed = []
    names = [stage.name for stage in all_stages()]
    for stage in all_stages()[names.index(args.from_stage) if args.from_stage else 0 :]:
        if not (stage.name in args.stage if args.stage else stage.runs_in(mode)):
            continue
        engine_ranks = stage.arguments.get("rollout_tp", 1)
        if ranks < stage.ranks or stage.every_gpu and (ranks < 2 or ranks % engine_ranks):
            text = f"this machine has {ranks}, and the stage runs {max(2, stage.ranks, engine_ranks)} ranks, "
            text += "of which NCCL refuses two on one GPU"
            result = dict(rows=[dict(name="needs several GPUs", verdict="skip", text=text)])
        else:
            result = run_stage(stage, out, mode, ranks if stage.every_gpu else 1)
        result |= dict(name=stage.name, text=stage.text, mode=mode, verdict=verdict(result["rows"]))
        (out / "stages" / f"{stage.name}.json").write_text(json.dumps(result))
        print(f"{result['verdict']:<5} {result.get('seconds', 0):6.1f} s  {stage.name}", flush=True)
        failed += [stage.name] * (result["verdict"] == "fail")
        for row in result["rows"]:
            if row["verdict"] == "fail":
                print("     ", row["name"], *(row.get(key, "") for key in ("value", "limit", "text")))
        write_page(out)
    print(f"{out / 'index.html'}: {'failed: ' + ', '.join(failed) if failed else 'no stage failed'}")
    return 1 if failed else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", action="store_true", help="fewer architectures, no training run")
    modes.add_argument("--rehearse", action="store_true", help="run on the CPU with tiny sizes")
    names = [stage.name for stage in all_stages()]
    add("--stage", metavar="NAME", action="append", choices=names, default=[], help=", ".join(names))
    add("--from", metavar="NAME", choices=names, dest="from_stage", help="begin with this stage")
    add("--out", metavar="DIR", default="runs/acceptance", help="directory of the results (runs/acceptance)")
    return parser.parse_args(argv)


def num_ranks(mode: str) -> int:
    """Return the number of GPUs, without importing torch; a rehearsal has two ranks."""
    if mode == "rehearse":
        return 2
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return found if visible is None else min(found, len(list(filter(None, visible.split(",")))))


def run_stage(stage: Stage, out: Path, mode: str, ranks: int) -> dict:
    """Run the stage in its own process group; return its findings and duration; add a failure if it broke."""
    file, log = (out / "stages" / f"{stage.name}.{suffix}" for suffix in ("json", "log"))
    file.unlink(missing_ok=True)
    limit = stage.seconds * (REHEARSAL_FACTOR if mode == "rehearse" else 1)
    python = [sys.executable]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*python, "-m", "tools.acceptance.worker", stage.name, str(out), mode]
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(mode), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code, ending = process.wait(limit), ""
        except subprocess.TimeoutExpired:
            code, ending = 1, f"it exceeded its time limit of {limit} s"
        finally:
            kill_tree(process)
    result = json.loads(file.read_text()) if file.exists() else dict(rows=[])
    if code and not any(row["verdict"] == "fail" for row in result["rows"]):
        ending = ending or f"exit code {code}"
        result["rows"].append(dict(name="runs to its end", verdict="fail", text=f"{ending}; {tail(log)}"))
    return result | dict(seconds=time.monotonic() - start)


def environment(mode: str) -> Mapping[str, str]:
    """Return the environment of a stage; in a rehearsal without GPUs and with one thread per rank."""
    variables = dict(PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
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
    """Return the results in `out`, in the order of the stages."""
    files = [out / "stages" / f"{stage.name}.json" for stage in all_stages()]
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    return [result for result in found if "verdict" in result]


def write_page(out: Path) -> None:
    found = results(out)
    (out / "acceptance.json").write_text(json.dumps(found, indent=1))
    (out / "index.html").write_text(page(found))


if __name__ == "__main__":
    sys.exit(main())
