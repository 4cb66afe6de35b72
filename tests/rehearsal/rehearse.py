"""train_rl.py on the stand-in for CUDA: `rehearse.py [--te] LINES <arguments of train_rl.py>`.

--te: also use the stand-in for Transformer Engine; the process must be a new interpreter.

At its end each process adds a file to the directory LINES: the lines of rl/ that it executed, as JSON {file:
[line, ...]}. After the run it calls functions that only faults or changes of size reach: the watchdog's dump,
a larger snapshot.
"""

import atexit
import json
import os
import sys
import threading
from pathlib import Path

import train_rl
from tests.rehearsal import cuda_stand_in
from tests.spawn import ROOT

RL = str(ROOT / "rl") + "/"


def main(lines: str) -> None:
    executed: dict[str, set[int]] = {}

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(RL):
            return None
        executed.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return trace

    def write() -> None:
        sys.settrace(None)
        found = {name.removeprefix(f"{ROOT}/"): sorted(numbers) for name, numbers in executed.items()}
        Path(lines).mkdir(exist_ok=True)
        Path(lines, f"{os.getpid()}.json").write_text(json.dumps(found))

    atexit.register(write)
    threading.settrace(trace)
    sys.settrace(trace)
    cuda_stand_in.install()
    import torch

    import rl.run.loop as loop
    from rl.checkpoint.shards import Shard
    from rl.checkpoint.snapshot import Snapshot

    run = loop.run

    def run_and_reach_the_rest(config, inputs, device, watchdog):
        code = run(config, inputs, device, watchdog)
        watchdog._dump_stacks()
        snapshot = Snapshot()
        for size in (1, 2):
            snapshot.take([Shard("x", ((0, size),), torch.zeros(size))])
        return code

    loop.run = run_and_reach_the_rest
    train_rl.leave(train_rl.main())


if __name__ == "__main__":
    if sys.argv[1] == "--te":
        del sys.argv[1]
        from tests.rehearsal import te_stand_in

        te_stand_in.install()
    sys.argv[1:], lines = sys.argv[2:], sys.argv[1]
    main(lines)
