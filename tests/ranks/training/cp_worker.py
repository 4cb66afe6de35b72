"""One rank of test_context_parallel.py: gradients and log-probs in layouts with and without `training.cp`.

    cp_worker.py CHECKPOINT OUT_DIR NAME=TPxPPxEPxCP[xVPP]:LOSS[,LOSS...] [...]

For example, two=1x1x1x2:pairs has two context parallel ranks and a loss of preferences. Rank 0 saves {(loss,
whether prompts are shared): outputs and gradient} to OUT_DIR/NAME.pt. LOSS is a policy loss, `pairs`,
`labels` (losses of preferences) or `values` (of a critic).
"""

import sys

from megatron_groups import new_grid, run_cases  # isort: skip

from dataclasses import replace
from functools import partial

import torch
from gradient_worker import EPS, config_of
from prefix_worker import batch_of

from rl.algorithms import dpo, kto, orpo, simpo, sppo
from rl.models import read_hf_config
from rl.objectives.value_loss import value_loss
from rl.phases.policy_gradient import policy_loss
from rl.training.engine import TrainingEngine
from rl.training.loss import Totals
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.optimizer import optimizer_parts
from rl.training.spec import ModelSpec
from rl.training.weights import load_hf

GROUPS = [(30, (5, 9, 0, 12)), (150, (20, 31, 31, 2)), (7, (20, 1)), (40, (3, 90, 4, 8)), (1, (64, 40))]
"""(tokens of the prompt, tokens of each response) of groups of samples."""
TOKENS = 190
"""Tokens of a micro-batch; more than any sequence has, so that several sequences share a row."""
ENLARGED = 1024
"""Factor of the step, so that the rounding of the weights from which it is read is far below 1e-7 of it."""


def losses_of(name: str, config, totals: Totals):
    """Yield (name, function of a micro-batch, consecutive samples that stay together)."""
    if name == "values":

        def loss(micro):
            losses, _ = value_loss(
                micro.values, micro.column("old_values"), micro.column("returns"), micro.mask, clip=0.3
            )
            return losses.sum() / totals.num_tokens, {}

        yield name, loss, 1
    elif name == "pairs":
        for algorithm in (dpo, orpo, simpo):
            options = {} if algorithm is not dpo else {"reference": "old_logprobs"}
            yield (algorithm.__name__, partial(algorithm.loss, totals=totals, config=config, **options), 2)
    elif name == "labels":
        yield "kto", partial(kto.loss, totals=totals, config=config, kl=0.1), 1
        yield "sppo", partial(sppo.loss, totals=totals, config=config), 1
    else:
        objective = replace(config.objective, loss=name)
        yield name, partial(policy_loss(replace(config, objective=objective)), totals=totals), 1


def results(how: str, checkpoint: str, device) -> dict:
    layout, _, names = how.partition(":")
    tp, pp, ep, cp, *vpp = map(int, layout.split("x"))
    hf = read_hf_config(checkpoint)
    config = config_of(checkpoint, tp, pp, TOKENS, cp, *vpp)
    config.training.ep = ep
    grid = new_grid(tp, pp, ep, config.training.expert_tp, cp, *vpp)
    optimizer = config.training.optimizer
    spec = ModelSpec(checkpoint, hf, "float32", has_values=names == "values", optimizer=optimizer)
    trainer = TrainingEngine(spec, config.training, grid, device)
    assert trainer.optimizer is not None
    batch = batch_of(GROUPS, hf["vocab_size"])
    batch.extra["labels"] = (torch.arange(len(batch)) % 3 > 0).float()
    totals = Totals(float(batch.mask.sum()), float(len(batch)), float(len(batch)))
    start = {name: tensor.clone() for name, tensor in trainer.full_weights()}
    found = {}
    for name in names.split(","):
        for kind, loss, together in losses_of(name, config, totals):
            batch.samples_per_unit = together
            for share in (False, True):
                trainer.shares_prompts = share
                plan = plan_minibatch(
                    batch,
                    list(range(len(batch))),
                    dp=grid.dp,
                    max_tokens=TOKENS * cp,
                    multiple=grid.micro_batch_multiple,
                    shared_prefix=share,
                )
                output = "values" if spec.has_values else "logprobs"
                (outputs,) = trainer.forward(batch, [plan], (output,))
                trainer.update(batch, plan, loss, lr=EPS * ENLARGED)
                gradient = {key: (start[key] - x) / ENLARGED for key, x in trainer.full_weights()}
                found[kind, share] = {"outputs": outputs, "gradient": gradient}
                load_hf(checkpoint, trainer.weight_map)
                trainer.start_from_present_weights()
                for part in optimizer_parts(trainer.optimizer):
                    for state in part.optimizer.state.values():
                        state["exp_avg"].zero_(), state["exp_avg_sq"].zero_()
                    for group in part.optimizer.param_groups:
                        group["step"] = 0
    return found


def main(checkpoint: str, out_dir: str, *cases: str) -> None:
    run_cases(out_dir, cases, lambda how, device: results(how, checkpoint, device))


if __name__ == "__main__":
    main(*sys.argv[1:])
