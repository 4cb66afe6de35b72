import json

from tests.spawn import run_ranks

PROGRAM = """
    import json, os, sys, time
    from dataclasses import fields
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from rl.runtime import group_warm_up as groups
    from rl.config.limits import PhaseLimits
    from rl.runtime.ranks import discover
    from rl.runtime.session import control_group, session

    with session(discover()) as device:
        rank = dist.get_rank()
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        alone = [dist.new_group([r]) for r in range(3)]
        own = [group for group in pairs if rank in dist.get_process_group_ranks(group)]
        unused = dist.new_group(list(range(3)))
        found = {"members": len(groups.groups_here()), "warmed": groups.warm_up(device, [*own, alone[rank]])}
        found["unused"] = unused._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
        groups.MARGIN_S = 0.5
        limits = {field.name: 0.5 for field in fields(PhaseLimits)} | {"start_up": 900.0}
        groups.limit_collectives(PhaseLimits(**limits))
        for name, group in (("default", None), ("control", control_group()), ("pair", pairs[0])):
            if rank == 0:  # nobody else comes
                try:
                    dist.all_reduce(torch.ones(1), group=group)
                except RuntimeError as error:
                    found[name] = str(error)
        print(json.dumps(found), flush=True)
        done = Path(sys.argv[1], "done")
        if rank == 0:
            done.touch()
        while not done.exists():  # the others stay connected while rank 0 waits for nothing
            time.sleep(0.05)
        os._exit(0)
"""


def test_group_warm_up_are_used_once_and_get_a_time_limit(tmp_path):
    found = [json.loads(out) for out in run_ranks(3, PROGRAM, tmp_path)]
    # The default group, the control group and one or two pairs; a group of one rank has nobody to talk to.
    assert [rank["members"] for rank in found] == [5, 6, 5]
    assert [rank["warmed"] for rank in found] == [3, 4, 3]
    assert [rank["unused"] for rank in found] == [0, 0, 0]
    # The phase's 0.5 s and the margin of 0.5 s, not the 900 s of the start-up.
    for name in ("default", "control", "pair"):
        assert "imed out" in found[0][name] and "1000ms" in found[0][name], found[0]
