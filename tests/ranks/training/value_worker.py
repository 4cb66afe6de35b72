"""One rank of test_values.py: values, loss and gradient of a critic in one or more layouts, or from
transformers' model.

    value_worker.py CHECKPOINT OUT_DIR NAME=TPxPP:MICRO_BATCH_TOKENS [...]       or NAME=hf

As in gradient_worker.py, the gradient is read off an optimizer step that is gradient descent with learning
rate 1.
"""

import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import torch  # noqa: E402
from gradient_worker import EPS, fixed_batch, totals_of  # noqa: E402
from megatron_groups import new_grid  # noqa: E402
from transformers import AutoModelForSequenceClassification  # noqa: E402

from rl.config.schema import Optimizer, Training  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.objectives.value_loss import value_loss  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.engine import TrainingEngine  # noqa: E402
from rl.training.micro_batch_plans import plan_minibatch  # noqa: E402
from rl.training.spec import ModelSpec  # noqa: E402

CLIP = 0.3


def columns_of_a_critic(batch):
    generator = torch.Generator().manual_seed(6)
    batch.old_values = torch.randn(len(batch.mask), generator=generator)
    batch.returns = torch.randn(len(batch.mask), generator=generator)
    return batch


def megatron(checkpoint: str, device, tp: int, pp: int, tokens: int) -> dict:
    hf = read_hf_config(checkpoint)
    training = Training(tp=tp, pp=pp, micro_batch_tokens=tokens)
    adam = Optimizer(lr=EPS, eps=EPS, clip_grad=0.0)
    spec = ModelSpec(checkpoint, hf, "float32", has_values=True, optimizer=adam)
    critic = TrainingEngine(spec, training, new_grid(tp, pp), device)
    batch = columns_of_a_critic(fixed_batch(hf["vocab_size"]))
    plan = plan_minibatch(batch, list(range(len(batch))), dp=critic.grid.dp, max_tokens=tokens)
    (values,) = critic.forward(batch, [plan], ("values",))
    before = {name: tensor.clone() for name, tensor in critic.full_weights()}
    num_tokens = totals_of(batch).num_tokens

    def loss(micro):
        token_loss, _ = value_loss(micro.values, micro.old_values, micro.returns, micro.mask, clip=CLIP)
        total = token_loss.sum() / num_tokens
        return total, {"loss": total}

    terms = critic.update(batch, plan, loss, lr=EPS)
    gradient = {name: before[name] - tensor for name, tensor in critic.full_weights()}
    weights = {name: tensor.double().norm() for name, tensor in before.items()}
    return {"values": values, "gradient": gradient, "terms": terms, "weights": weights}


def hugging_face(checkpoint: str) -> dict:
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float64)
    batch = columns_of_a_critic(fixed_batch(model.config.vocab_size))
    values = []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        hidden = model.model(torch.tensor([[*prompt.tolist(), *response.tolist()]])).last_hidden_state[0]
        values.append(model.score(hidden)[len(prompt) - 1 : -1, 0])
    values = torch.cat(values)
    token_loss, _ = value_loss(
        values, batch.old_values.double(), batch.returns.double(), batch.mask, clip=CLIP
    )
    loss = token_loss.sum() / totals_of(batch).num_tokens
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([g.norm() for g in gradient.values()]).norm()
    return {
        "values": values.detach(),
        "gradient": gradient,
        "terms": {"loss": float(loss), "grad_norm": float(norm)},
    }


def main(checkpoint: str, out_dir: str, *cases: str) -> None:
    with session(RANKS) as device:
        for case in cases:
            name, _, how = case.partition("=")
            if how == "hf":
                result = hugging_face(checkpoint)
            else:
                layout, _, tokens = how.partition(":")
                tp, pp = map(int, layout.split("x"))
                result = megatron(checkpoint, device, tp, pp, int(tokens))
            if RANKS.rank == 0:
                torch.save(result, f"{out_dir}/{name}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
