"""The control plane as the number of ranks grows: simulated ranks, and the objects and files of a step."""

import json
import subprocess
import sys

from tests.spawn import ROOT, run_ranks

COUNTED = """
import json, sys
from pathlib import Path
import train_rl
from rl.run_directory.metric_log import MetricLog
from rl.runtime import collectives

(config, run), encode, write, sent = sys.argv[1:], collectives.encode, MetricLog.write, []

def counted(value, *types):
    content, caller = encode(value, *types), sys._getframe(2).f_code
    sent.append((f"{Path(caller.co_filename).stem}.{caller.co_name}", len(content)))
    return content

def logged(self, step, metrics):
    write(self, step, metrics)
    files = (path for path in Path(run).rglob("*") if path.suffix != ".partial")  # they are renamed
    sizes = [path.stat().st_size for path in files if path.is_file()]
    with Path(run).with_name("counts").open("a") as file:
        file.write(json.dumps([sent, len(sizes), sum(sizes)]) + "\\n")
    sent.clear()

collectives.encode, MetricLog.write = counted, logged
sys.exit(train_rl.main(["--config", config, f"run.dir={run}", "run.max_steps=4"]))
"""


def test_simulated_ranks_meet_fail_and_stop():
    command = [sys.executable, ROOT / "tools" / "dev" / "many_ranks.py", "32", "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert rows["stacks"].split()[7] == "63" and float(rows["rendezvous"].split()[6]) > 0.01


def test_a_step_gathers_no_objects_and_its_files_do_not_grow(config, tmp_path):
    """With 2 and with 4 ranks."""
    found = []
    for world in (2, 4):
        run_ranks(world, COUNTED, config, tmp_path / str(world) / "run", timeout=200)
        lines = (tmp_path / str(world) / "counts").read_text().splitlines()
        (started, *_), (_, before, _), (objects, files, num_bytes) = map(
            json.loads, [lines[0], *lines[-3:-1]]
        )
        assert started
        found.append((objects, files - before))
        print(world, objects, files - before, num_bytes)
    assert found[0] == found[1] and not found[0][0]
