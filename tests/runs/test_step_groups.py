"""A step communicates on the groups that are warmed up, and on no other: NCCL allocates no memory later, and
no memory for a group without use.

Each layout has the parts of shipped configs, in small: all sizes above 1 are 2.
"""

import json

import pytest

from tests.checkpoints import save_tiny
from tests.spawn import run_ranks
from tests.toy import write_config

PROGRAM = """
    import json

    import train_rl
    from tests.rehearsal import cuda_stand_in

    cuda_stand_in.install()
    import torch.distributed as dist

    import rl.run.loop as loop
    from rl.dry_run.memory import layout_of, num_training_groups
    from rl.dry_run.shape import models_of
    from rl.run import set_up
    from rl.runtime.group_warm_up import groups_here, warm_up

    def calls():
        backends = lambda group: (group._get_backend(device) for device in group._device_types)
        return {g: sum(b._get_sequence_number_for_group() for b in backends(g)) for g in groups_here()}

    before, run, found = {}, loop.run, {}

    def warm_and_count(device, groups):
        made = calls()
        number = warm_up(device, groups)
        before.update(calls())
        found["warmed"] = sorted(n for n, group in enumerate(made) if before[group] > made[group])
        found["number"] = number - 1  # without the control group, which is on gloo
        return number

    def run_and_count(config, inputs, *others):
        code = run(config, inputs, *others)
        after = calls()
        used = [group.size() > 1 and after[group] > calls for group, calls in before.items()]
        found["used"] = [number for number, is_used in enumerate(used) if is_used]
        found["names"] = [group.group_desc for group in before]
        models, _ = models_of(config)
        layout = layout_of(config, dist.get_world_size(), dist.get_world_size(), models)
        found["counted"] = num_training_groups(config, layout, models)
        print(json.dumps(found), flush=True)
        return code

    loop.run, set_up.warm_up = run_and_count, warm_and_count
    train_rl.leave(train_rl.main())
"""
EXPERTS = ("model.path=DIR/experts", "training.recompute=full")
LAYOUTS = {
    "tp, dp": ("training.tp=2",),
    "tp, pp": ("training.tp=2", "training.pp=2"),
    "ep, dp, attention of replicas": (
        *EXPERTS,
        *("training.ep=2", "rollout.ep=2", "rollout.dp_attention=true"),
    ),
    "tp, ep, dp": (*EXPERTS, "training.tp=2", "training.ep=2", "rollout.tp=2"),
    "tp, cp, ep": (*EXPERTS, "training.tp=2", "training.cp=2", "training.ep=2", "rollout.tp=2"),
    "a copy on each rank": ("training.backend=transformers",),
    "copies on two ranks": ("training.backend=transformers", "training.shard=2"),
    "copies on four ranks": ("training.backend=transformers", "training.shard=4"),
    "tp, pp, vpp, ep, critic": (
        *EXPERTS,
        *("training.tp=2", "training.pp=2", "training.vpp=2", "training.ep=2", "algorithm=ppo"),
    ),
}
IN_SUITE = ("copies on two ranks", "tp, cp, ep", "tp, pp, vpp, ep, critic")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in IN_SUITE else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_step_uses_the_groups_that_are_warmed_up(layout, toy, tmp_path):
    keys = [key.replace("DIR", str(tmp_path)) for key in LAYOUTS[layout]]
    if keys[0].startswith("model.path"):
        save_tiny("Qwen3MoeForCausalLM", tmp_path / "experts", seed=3, num_hidden_layers=4)
    config = write_config(tmp_path, toy, "model.dtype=bfloat16", "checkpoint.every=1", *keys)
    for output in run_ranks(4, PROGRAM, "--config", config, timeout=300):
        found = json.loads(output.splitlines()[-1])
        names = [found["names"][number] for number in found["used"]]
        assert found["used"] == found["warmed"], names
        assert found["number"] == len(names) - 1 == found["counted"], names
