"""One rank of test_mtp.py: an update of a policy with and without its head for multi-token prediction.

    mtp_worker.py CHECKPOINT OUT_DIR NAME=TPxPP[xEP]:TOKENS [...]   or NAME=hf

As in gradient_worker.py the gradient is read off the step. Rank 0 saves the gradient of the head by Hugging
Face name, its metrics, and what differs between the two updates to OUT_DIR/NAME.pt.
"""

import sys

from megatron_groups import new_grid, run_cases  # isort: skip

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from gradient_worker import EPS, config_of, fixed_batch, totals_of
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

from rl.config.training import Mtp
from rl.engines.engines import build_policy
from rl.models import read_hf_config
from rl.phases.policy_gradient import policy_loss
from rl.training.micro_batch_plans import plan_minibatch


def updated(config, lr: float, device):
    """Return the weights before and after an update, its results and metrics, the random state, and the
    metrics of a second update without a token that counts."""
    training = replace(config.training, shared_prefix=False, mtp=Mtp(head_lr=lr))
    config = replace(config, training=training)
    hf = read_hf_config(config.model.path)
    grid = new_grid(training.tp, training.pp, ep=training.ep, etp=training.expert_tp)
    policy = build_policy(config, hf, grid, device)
    batch = fixed_batch(hf["vocab_size"])
    plan = plan_minibatch(batch, list(range(8)), dp=grid.dp, max_tokens=training.micro_batch_tokens)
    before = {name: tensor.clone() for name, tensor in policy.full_weights()}
    loss = partial(policy_loss(config), totals=totals_of(batch))
    result = policy.update(batch, plan, loss, lr=EPS)
    metrics = policy.parts.metrics(device.torch)
    after = {name: tensor.clone() for name, tensor in policy.full_weights()}
    states = torch.get_rng_state().tolist()
    policy.update(replace(batch, mask=torch.zeros_like(batch.mask)), plan, loss, lr=0.0)
    return before, after, result, metrics, states, policy.parts.metrics(device.torch)


def megatron(config, device) -> dict:
    _, plain, *expected, _, state, _ = updated(config, 0.0, device)
    before, after, *found, metrics, with_head, of_none = updated(config, EPS, device)
    differing = [name for name, tensor in plain.items() if not torch.equal(tensor, after[name])]
    if expected != found or state != with_head:
        differing.append(f"{expected} {found}")
    gradient = {name: before[name] - after[name] for name in before.keys() - plain.keys()}
    return dict(differing=differing, gradient=gradient, metrics=metrics, of_none=of_none)


def transformers_head(config) -> dict:
    """Return the head's gradient by autograd, from the last states of transformers' model."""
    path = config.model.path
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    number = model.config.num_hidden_layers
    prefix = f"model.layers.{number}."
    tensors = load_file(Path(path, "model.safetensors"))
    own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    layer = DeepseekV3DecoderLayer(model.config, number - 1).eval()
    state = layer.state_dict()
    experts = {n: t for n, t in own.items() if ".experts." in n}
    gates, ups, downs = (
        torch.stack([experts[f"mlp.experts.{i}.{kind}_proj.weight"] for i in range(8)])
        for kind in ("gate", "up", "down")
    )
    stacked = {"mlp.experts.gate_up_proj": torch.cat([gates, ups], 1), "mlp.experts.down_proj": downs}
    layer.load_state_dict({n: stacked.get(n, own.get(n)) for n in state})
    further = {n: own[n].requires_grad_() for n in own if n not in state and n not in experts}
    eps, temperature = model.config.rms_norm_eps, config.rollout.temperature
    batch, start = fixed_batch(model.config.vocab_size), 0
    loss = accepted = 0.0
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        ids = torch.tensor([*prompt.tolist(), *response.tolist()])[None]
        mask = batch.mask[start : start + len(response)]
        start += len(response)
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
            rotary = model.model.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
            log_p = (model.lm_head(hidden)[0] / temperature).log_softmax(-1)
            embeddings = model.model.embed_tokens(ids.roll(-1, 1))
            embeddings[:, 0] = 0
        size = (hidden.shape[-1],)
        x = torch.cat(
            [
                rms_norm(embeddings, size, further["enorm.weight"], eps),
                rms_norm(hidden, size, further["hnorm.weight"], eps),
            ],
            -1,
        )
        causal = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        x = linear(x, further["eh_proj.weight"])
        x = layer(x, attention_mask=causal, position_embeddings=rotary)
        x = rms_norm(x[0] if isinstance(x, tuple) else x, size, further["shared_head.norm.weight"], eps)
        log_q = (linear(x, model.lm_head.weight)[0] / temperature).log_softmax(-1)
        for number_of_token in range(1, len(response)):
            at = len(prompt) + number_of_token - 1  # the position that predicts the token
            p, log = log_p[at].exp(), log_q[at - 1]
            loss = loss + mask[number_of_token] * (p * (log_p[at] - log)).sum()
            accepted += float(mask[number_of_token] * torch.minimum(p, log.exp()).sum())
    first = batch.lengths.cumsum(0) - batch.lengths
    counted = batch.mask.sum() - sum(batch.mask[i] for i, n in zip(first, batch.lengths) if n)
    (loss / counted).backward()
    gradient = {prefix + n: p.grad for n, p in layer.named_parameters() if n not in stacked}
    gradient |= {prefix + n: p.grad for n, p in further.items() if p.grad is not None}
    gates, ups = dict(layer.named_parameters())["mlp.experts.gate_up_proj"].grad.chunk(2, 1)
    downs = dict(layer.named_parameters())["mlp.experts.down_proj"].grad
    for kind, parts in (("gate", gates), ("up", ups), ("down", downs)):
        gradient |= {f"{prefix}mlp.experts.{i}.{kind}_proj.weight": parts[i] for i in range(8)}
    return dict(
        gradient=gradient, metrics={"mtp/loss": float(loss / counted), "mtp/acceptance": accepted / counted}
    )


def main(checkpoint: str, out_dir: str, *cases: str) -> None:
    def results(how: str, device) -> dict:
        layout, _, tokens = how.partition(":")
        tp, pp, *ep = map(int, layout.split("x")) if tokens else (1, 1)
        config = config_of(checkpoint, tp, pp, int(tokens or 1))
        config = replace(config, training=replace(config.training, ep=ep[0] if ep else 1))
        return megatron(config, device) if tokens else transformers_head(config)

    run_cases(out_dir, cases, results)


main(sys.argv[1], sys.argv[2], *sys.argv[3:])
