"""One rank of test_gradients.py: the loss and the gradient of one mini-batch, in one or more layouts and
packings.

    gradient_worker.py CHECKPOINT OUT_DIR NAME=TPxPP:MICRO_BATCH_TOKENS [...]       or NAME=hf, NAME=decay

The gradient is read off an optimizer step with an epsilon so large that Adam is gradient descent with
learning rate 1: what is compared went through the pipeline, data parallel and distributed optimizer code that
a run uses. Rank 0 saves {Hugging Face name: gradient}, the norms of the weights, loss and gradient norm to
OUT_DIR/NAME.pt.
"""

import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

from dataclasses import replace  # noqa: E402
from functools import partial  # noqa: E402

import torch  # noqa: E402
from megatron_groups import new_grid  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from rl.config.schema import Config, Data, Model, Objective, Optimizer, Rollout, Training, resolve  # noqa: E402
from rl.data.batch import Batch  # noqa: E402
from rl.engines.engines import build_policy  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.phases.policy_gradient import policy_loss  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.loss import Totals  # noqa: E402
from rl.training.micro_batch_plans import plan_minibatch  # noqa: E402
from rl.training.packing import MicroBatch  # noqa: E402

EPS = 1e7
"""The step is g / (1 + |g| / EPS) for a gradient g: below the rounding of float32 for gradients up to 1."""


def config_of(checkpoint: str, tp: int, pp: int, micro_batch_tokens: int) -> Config:
    optimizer = Optimizer(lr=EPS, eps=EPS, clip_grad=0.0)
    return resolve(
        Config(
            model=Model(path=checkpoint, dtype="float32"),
            data=Data(prompts_per_step=4),
            training=Training(
                tp=tp, pp=pp, micro_batch_tokens=micro_batch_tokens, head_chunk_tokens=11, optimizer=optimizer
            ),
            rollout=Rollout(temperature=0.8, samples_per_prompt=2),
            objective=Objective(
                advantage="grpo",
                loss="ppo",
                aggregation="seq-mean-token-mean",
                entropy_coef=0.05,
                kl_coef=0.1,
                clip_low=0.1,
                clip_high=0.1,
            ),
        )
    )


def fixed_batch(vocab_size: int) -> Batch:
    """Eight samples with every column that GRPO's loss reads; tokens in the middle of some responses are
    masked."""
    generator = torch.Generator().manual_seed(5)

    def tokens(length):
        return torch.randint(3, vocab_size, (length,), generator=generator).int().numpy()

    lengths = [(5, 9), (17, 1), (1, 30), (33, 0), (8, 8), (2, 50), (40, 21), (3, 3)]
    total = sum(r for _, r in lengths)
    batch = Batch(
        prompt_ids=[tokens(p) for p, _ in lengths],
        response_ids=[tokens(r) for _, r in lengths],
        groups=torch.arange(8) // 2,
        truncated=torch.zeros(8, dtype=torch.bool),
        mask=(torch.rand(total, generator=generator) > 0.2).float(),
    )
    batch.old_logprobs = -4.5 + torch.randn(total, generator=generator) * 0.3
    batch.ref_logprobs = -4.5 + torch.randn(total, generator=generator) * 0.3
    batch.advantages = torch.randn(total, generator=generator)
    return batch


def totals_of(batch: Batch) -> Totals:
    return Totals(
        num_tokens=float(batch.mask.sum()), num_samples=float(len(batch)), num_units=float(len(batch))
    )


def megatron(config: Config, device, tp: int, pp: int) -> dict:
    hf = read_hf_config(config.model.path)
    trainer = build_policy(config, hf, new_grid(tp, pp), device)
    batch = fixed_batch(hf["vocab_size"])
    before = {name: tensor.clone() for name, tensor in trainer.full_weights()}
    loss = partial(policy_loss(config), totals=totals_of(batch))
    plan = plan_minibatch(
        batch, list(range(8)), dp=trainer.grid.dp, max_tokens=config.training.micro_batch_tokens
    )
    result = trainer.update(batch, plan, loss, lr=EPS)
    terms = result.metrics | {"grad_norm": result.grad_norm}
    gradient = {name: before[name] - tensor for name, tensor in trainer.full_weights()}
    weights = {name: tensor.double().norm() for name, tensor in before.items()}
    return {"gradient": gradient, "terms": terms, "weights": weights}


def weight_decay(config: Config, device) -> dict[str, float]:
    """Return the remaining share of each weight after a step of weight decay only: lr 0.1 times weight decay
    5.
    """
    optimizer = replace(config.training.optimizer, eps=1e30, weight_decay=5.0)
    config = replace(config, training=replace(config.training, optimizer=optimizer))
    hf = read_hf_config(config.model.path)
    trainer = build_policy(config, hf, new_grid(1, 1), device)
    batch = fixed_batch(hf["vocab_size"])
    before = {name: tensor.clone() for name, tensor in trainer.full_weights()}
    plan = plan_minibatch(batch, [0, 1], dp=trainer.grid.dp, max_tokens=4096)
    trainer.update(batch, plan, partial(policy_loss(config), totals=totals_of(batch)), lr=0.1)
    return {name: float(tensor.norm() / before[name].norm()) for name, tensor in trainer.full_weights()}


def hugging_face(config: Config) -> dict:
    """The same loss from transformers' model, one unpacked sequence after the other, in float64."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
    batch = fixed_batch(model.config.vocab_size)
    logprobs, entropies = [], []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        ids = torch.tensor([*prompt.tolist(), *response.tolist()])
        log_p = (model(ids[None]).logits[0] / config.rollout.temperature).log_softmax(-1)[
            len(prompt) - 1 : -1
        ]
        logprobs.append(log_p.gather(1, ids[len(prompt) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    micro = MicroBatch(
        samples=list(range(8)),
        tokens=None,
        position_ids=None,
        bounds=None,
        attention=None,
        predict_at=None,
        targets=None,
        lengths=batch.lengths,
        column_index=None,
        columns={k: v.double() for k, v in batch.loss_columns().items()},
    )
    micro.logprobs, micro.entropy = torch.cat(logprobs), torch.cat(entropies)
    value, terms = policy_loss(config)(micro, totals_of(batch))
    value.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([g.norm() for g in gradient.values()]).norm()
    return {
        "gradient": gradient,
        "terms": {k: float(v) for k, v in terms.items()} | {"grad_norm": float(norm)},
    }


def main(checkpoint: str, out_dir: str, *cases: str) -> None:
    with session(RANKS) as device:
        for case in cases:
            name, _, how = case.partition("=")
            if how == "hf":
                result = hugging_face(config_of(checkpoint, 1, 1, 1))
            elif how == "decay":
                result = weight_decay(config_of(checkpoint, 1, 1, 4096), device)
            else:
                layout, _, tokens = how.partition(":")
                tp, pp = map(int, layout.split("x"))
                result = megatron(config_of(checkpoint, tp, pp, int(tokens)), device, tp, pp)
            if RANKS.rank == 0:
                torch.save(result, f"{out_dir}/{name}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
