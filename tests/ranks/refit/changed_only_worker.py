"""One rank of test_changed_only.py.

    changed_only_worker.py CHECKPOINT OUT

Two training ranks and two generating ranks, in bfloat16. The versions of the weights travel twice, to one
engine as `refit.changed_only` sends them and to another one whole. Each rank writes to OUT.<rank> the bytes
of each version, and a generating rank the parameters that differ between the two engines.
"""

import json
import sys
from dataclasses import replace

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from rl.config.schema import Config, Model, Refit, Rollout, Training  # noqa: E402
from rl.features.roles.link import Link  # noqa: E402
from rl.models import architecture, read_hf_config  # noqa: E402
from rl.runtime.checksum import bits  # noqa: E402
from rl.runtime.device import choose_device  # noqa: E402
from rl.training.engine import TrainingEngine  # noqa: E402
from rl.training.spec import ModelSpec  # noqa: E402
from tests.ranks.refit.link_worker import enter_role
from tests.ranks.refit.refit_worker import RANKS, PlainEngine, contents
from tests.ranks.training.megatron_groups import new_grid  # noqa: E402

TRAIN, ROLLOUT = (0, 1), (2, 3)


def some(parameter):
    """Change one element in 50."""
    parameter.data.view(-1)[7::50] *= 1.5


def all_of(parameter):
    parameter.data *= 1.5


def none(parameter):
    pass


UPDATES = (some, none, all_of, some)
"""Changes before versions 1 to 4."""


def send(link, config, hf) -> list[dict]:
    """Send the weights of the checkpoint, and the weights after each update."""
    spec, grid = ModelSpec(config.model.path, hf, "bfloat16"), new_grid(1, 1, 2)
    trainer = TrainingEngine(spec, config.training, grid, link.device)
    link.plan_weights(config, hf, trainer=trainer)
    results = []
    for version, update in enumerate((*UPDATES, none)):
        link.send_weights(version)
        moved = link.wait_sent()
        results.append(dict(moved=moved.sent, unabridged=moved.unabridged))
        for parameter in trainer.weight_map.parameters.values():
            update(parameter)
    return results


def receive(link, config, hf) -> tuple[list[dict], list[dict]]:
    """Return the bytes of each version, and the engine's weights after it."""
    engine = PlainEngine(architecture(hf).weights(hf), 1, link.device, 2, torch.bfloat16)
    link.plan_weights(config, hf, engine=engine)
    results, held = [], []
    for version in range(len(UPDATES) + 1):
        results.append(dict(moved=link.receive_weights(version).received))
        link.check_weights()
        held.append(contents(engine))
    return results, held


def main(checkpoint: str, out: str) -> None:
    device, hf = choose_device(RANKS.local_rank), read_hf_config(checkpoint)
    job, own, trains = enter_role(len(TRAIN), device)
    whole = Config(
        model=Model(path=checkpoint, dtype="bfloat16"),
        training=Training(ep=2),
        rollout=Rollout(tp=1, ep=2),
        refit=Refit(buffer_mib=1, check_every=1),
    )
    forms = {"changed": replace(whole, refit=replace(whole.refit, changed_only=True)), "whole": whole}
    results, weights = {}, {}
    for name, config in forms.items():
        roles = dict(rank=RANKS.rank, train=TRAIN, rollout=ROLLOUT, device=device)
        link = Link(own.clone(name), dist.PrefixStore(name, job), **roles)
        if trains:
            results[name] = send(link, config, hf)
        else:
            results[name], weights[name] = receive(link, config, hf)
        dist.barrier(group=link._control)
        for group in (link._control, link._weights):  # a process has one link, and both the same names
            dist.destroy_process_group(group)
    if not trains:
        pairs = zip(weights["changed"], weights["whole"])
        results["apart"] = [[n for n in a if not torch.equal(bits(a[n]), bits(b[n]))] for a, b in pairs]
    with open(f"{out}.{RANKS.rank}", "w") as file:
        json.dump(results, file)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
