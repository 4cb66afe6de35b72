"""One rank of test_gradients.py: outputs, loss and gradient of one mini-batch, in layouts and packings.

    gradient_worker.py CHECKPOINT OUT_DIR NAME=TPxPP[xCP[xVPP]]:TOKENS [...]   or NAME=hf, NAME=decay

For example, pp2=1x2:35 has two pipeline stages and micro_batch_tokens=35. The model is a policy, or a critic
if the checkpoint is a classifier. The gradient is read off an optimizer step with an epsilon so large that
Adam is gradient descent with learning rate 1: what is compared went through the pipeline, data parallel and
distributed optimizer code that a run uses. Rank 0 saves outputs, {Hugging Face name: gradient}, norms of the
weights, loss and gradient norm to OUT_DIR/NAME.pt.
"""

import sys

from megatron_groups import new_grid, run_cases  # isort: skip

from dataclasses import replace
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl.config.objective import Objective
from rl.config.schema import Config, Data, Model, Optimizer, Rollout, Training, resolve
from rl.data.batch import Batch
from rl.engines.engines import build_policy
from rl.models import read_hf_config
from rl.objectives.value_loss import value_loss
from rl.phases.policy_gradient import policy_loss
from rl.training.engine import TrainingEngine
from rl.training.loss import Totals
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.packing import MicroBatch
from rl.training.spec import ModelSpec

EPS = 1e7
"""The step is g / (1 + |g| / EPS) for a gradient g: below the rounding of float32 for gradients up to 1."""


def config_of(
    checkpoint: str, tp: int, pp: int, micro_batch_tokens: int, cp: int = 1, vpp: int = 1
) -> Config:
    optimizer = Optimizer(lr=EPS, eps=EPS, clip_grad=0.0)
    return resolve(
        Config(
            model=Model(path=checkpoint, dtype="float32"),
            data=Data(prompts_per_step=4),
            training=Training(
                tp=tp,
                pp=pp,
                cp=cp,
                vpp=vpp,
                micro_batch_tokens=micro_batch_tokens,
                head_chunk_tokens=11,
                optimizer=optimizer,
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
    masked, and the last two samples share their prompt."""
    generator = torch.Generator().manual_seed(5)

    def tokens(length):
        return torch.randint(3, vocab_size, (length,), generator=generator).int().numpy()

    lengths = [(5, 9), (17, 1), (1, 30), (33, 0), (8, 8), (2, 50), (40, 21), (40, 3)]
    total = sum(r for _, r in lengths)
    batch = Batch(
        prompt_ids=[tokens(p) for p, _ in lengths],
        response_ids=[tokens(r) for _, r in lengths],
        groups=torch.arange(8) // 2,
        truncated=torch.zeros(8, dtype=torch.bool),
        mask=(torch.rand(total, generator=generator) > 0.2).float(),
    )
    batch.prompt_ids[7] = batch.prompt_ids[6]
    batch.old_logprobs = -4.5 + torch.randn(total, generator=generator) * 0.3
    batch.ref_logprobs = -4.5 + torch.randn(total, generator=generator) * 0.3
    batch.advantages = torch.randn(total, generator=generator)
    return batch


def with_columns_of_a_critic(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(6)
    batch.extra["old_values"] = torch.randn(len(batch.mask), generator=generator)
    batch.extra["returns"] = torch.randn(len(batch.mask), generator=generator)
    return batch


def critic_loss(micro: MicroBatch, totals: Totals):
    token_loss, _ = value_loss(
        micro.values, micro.column("old_values"), micro.column("returns"), micro.mask, clip=0.3
    )
    total = token_loss.sum() / totals.num_tokens
    return total, {"loss": total}


def is_critic(hf: dict) -> bool:
    return "Classification" in hf["architectures"][0]


def totals_of(batch: Batch) -> Totals:
    return Totals(
        num_tokens=float(batch.mask.sum()), num_samples=float(len(batch)), num_units=float(len(batch))
    )


def megatron(config: Config, device) -> dict:
    hf, training = read_hf_config(config.model.path), config.training
    grid = new_grid(training.tp, training.pp, cp=training.cp, vpp=training.vpp)
    batch, name = with_columns_of_a_critic(fixed_batch(hf["vocab_size"])), "logprobs"
    if is_critic(hf):
        spec = ModelSpec(config.model.path, hf, "float32", has_values=True, optimizer=training.optimizer)
        trainer, loss, name = TrainingEngine(spec, training, grid, device), critic_loss, "values"
    else:
        trainer, loss = build_policy(config, hf, grid, device), policy_loss(config)
    plan = plan_minibatch(
        batch,
        list(range(8)),
        dp=grid.dp,
        max_tokens=training.micro_batch_tokens,
        multiple=grid.micro_batch_multiple,
    )
    (outputs,) = trainer.forward(batch, [plan], (name,))
    before = {name: tensor.clone() for name, tensor in trainer.full_weights()}
    result = trainer.update(batch, plan, partial(loss, totals=totals_of(batch)), lr=EPS)
    terms = result.metrics | {"grad_norm": result.grad_norm}
    gradient = {name: before[name] - tensor for name, tensor in trainer.full_weights()}
    weights = {name: tensor.double().norm() for name, tensor in before.items()}
    return {"outputs": outputs, "gradient": gradient, "terms": terms, "weights": weights}


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
    """The same from transformers' model, one unpacked sequence after the other, in float64."""
    hf = read_hf_config(config.model.path)
    kind = AutoModelForSequenceClassification if is_critic(hf) else AutoModelForCausalLM
    model = kind.from_pretrained(config.model.path, dtype=torch.float64)
    batch = with_columns_of_a_critic(fixed_batch(hf["vocab_size"]))
    outputs, entropies = [], []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        ids, before = torch.tensor([*prompt.tolist(), *response.tolist()]), slice(len(prompt) - 1, -1)
        if is_critic(hf):
            outputs.append(model.score(model.model(ids[None]).last_hidden_state[0])[before, 0])
            continue
        log_p = (model(ids[None]).logits[0] / config.rollout.temperature).log_softmax(-1)[before]
        outputs.append(log_p.gather(1, ids[len(prompt) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    nothing = dict.fromkeys(
        ("tokens", "position_ids", "bounds", "attention", "predict_at", "targets", "column_index")
    )
    columns = {k: v.double() for k, v in batch.loss_columns().items()}
    micro = MicroBatch(samples=list(range(8)), lengths=batch.lengths, columns=columns, **nothing)
    if is_critic(hf):
        micro.outputs["values"] = torch.cat(outputs)
    else:
        micro.outputs |= dict(logprobs=torch.cat(outputs), entropy=torch.cat(entropies))
    value, terms = (critic_loss if is_critic(hf) else policy_loss(config))(micro, totals_of(batch))
    value.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([g.norm() for g in gradient.values()]).norm()
    terms = {k: float(v) for k, v in terms.items()} | {"grad_norm": float(norm)}
    return {"outputs": torch.cat(outputs).detach(), "gradient": gradient, "terms": terms}


def main(checkpoint: str, out_dir: str, *cases: str) -> None:
    def results(how: str, device) -> dict:
        if how == "hf":
            return hugging_face(config_of(checkpoint, 1, 1, 1))
        if how == "decay":
            return weight_decay(config_of(checkpoint, 1, 1, 4096), device)
        layout, _, tokens = how.partition(":")
        tp, pp, *more = map(int, layout.split("x"))
        return megatron(config_of(checkpoint, tp, pp, int(tokens), *more), device)

    run_cases(out_dir, cases, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
