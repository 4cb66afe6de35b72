"""train_rl.py on the stand-in for CUDA: `rehearse.py [--te] LINES <arguments of train_rl.py>`.

--te: also use the stand-in for Transformer Engine; the process must be a new interpreter.

At its end each process adds a file to the directory LINES: the statements that depend on CUDA and that it
reached, as JSON [[file, line], ...]. After the run it calls functions that only faults, changes of size or
refused configs reach: the watchdog's dump, a larger snapshot, the check of the device.
"""

import atexit
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import train_rl
from tests.rehearsal import cuda_stand_in


def main(lines: str) -> None:
    def write() -> None:
        Path(lines).mkdir(exist_ok=True)
        Path(lines, f"{os.getpid()}.json").write_text(json.dumps(sorted(cuda_stand_in.reached)))

    atexit.register(write)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # of the process that this one was forked from
    cuda_stand_in.install(notes=True)
    import torch

    import rl.run.loop as loop
    from rl.checkpoint.shards import Shard
    from rl.checkpoint.snapshot import Snapshot

    run = loop.run

    def run_and_reach_the_rest(config, inputs, device, watchdog):
        in_order = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        sizes = config.training
        splits_layers = max(sizes.tp, sizes.cp, sizes.expert_tp) > 1
        assert in_order == (splits_layers and not config.roles.is_on), "one queue is for split layers"
        code = run(config, inputs, device, watchdog)
        watchdog._dump_stacks()
        snapshot = Snapshot()
        for size in (1, 2):
            snapshot.take([Shard("x", ((0, size),), torch.zeros(size))])
        refuse(replace(config, rollout=replace(config.rollout, carry_over_cache="keep")), device)
        divided = replace(config.training, cp=2)
        refuse(replace(config, model=replace(config.model, dtype="float32"), training=divided), device)
        warm = replace(config.rollout, temperature=0.5)
        refuse(replace(config, model=replace(config.model, numerics="bitwise"), rollout=warm), device)
        return code

    loop.run = run_and_reach_the_rest
    train_rl.leave(train_rl.main())


def refuse(config, device) -> None:
    """Raise AssertionError if the config is accepted on a GPU."""
    from rl.config.options import ConfigError
    from rl.engines.rollout_engines import check_device

    try:
        check_device(config, device)
    except ConfigError as error:
        assert "is for CPU" in str(error)
    else:
        raise AssertionError(config)


if __name__ == "__main__":
    if sys.argv[1] == "--te":
        del sys.argv[1]
        from tests.rehearsal import te_stand_in

        te_stand_in.install()
    sys.argv[1:], lines = sys.argv[2:], sys.argv[1]
    main(lines)
