"""One rank of test_adapter.py: outputs, merged weights and gradients of adapters in several layouts.

    adapter_worker.py CHECKPOINT OUT_DIR 'NAME=LAYOUT[;KEY=VALUE ...]' [...]
    adapter_worker.py CHECKPOINT OUT_DIR 'resume=resume;OTHER_CHECKPOINT'

LAYOUT is TPxPPxEP[xETP]; KEY=VALUE overrides the configuration. Rank 0 saves what `results` returns for each
to OUT_DIR/NAME.pt. The gradients are read off an optimizer step that is gradient descent. `resume` continues
from checkpoints and saves what `resume` returns.
"""

import sys

from megatron_groups import new_grid, run_cases  # isort: skip

import torch

from rl.checkpoint.store import CheckpointStore, WronglyLoaded
from rl.config.options import ConfigError, load
from rl.config.run_models import hf_config_of, run_models
from rl.config.schema import Config, Run, resolve
from rl.engines.engines import build_policy
from rl.models import read_hf_config
from rl.models.boxes import index
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.optimizer import optimizer_tensors
from rl.training.weights import full_weights
from tools.hf_reference import random_batch

EPS = 1e7
"""Epsilon of Adam and learning rate: an epsilon so far above the gradients makes its step the gradient."""
OPTIONS = (
    "model.dtype=float32",
    "objective.kl_coef=0.1",  # so that there is a reference
    "training.micro_batch_tokens=96",
    "training.head_chunk_tokens=7",
    f"training.optimizer={{lr: {EPS}, eps: {EPS}, clip_grad: 0.0}}",
    "adapter={kind: lora, rank: 4, alpha: 6.0}",
)
KIND = ("adapter={kind: dora, init: pissa, rank: 4, alpha: 6.0}",)
"""Kind of the adapters in tests of a resume: the one with the most state to restore."""


@torch.no_grad()
def fill(trainer) -> None:
    """Add random values, the same in every layout, to every B and magnitude, as after some updates."""
    learned = trainer.learned_map
    for weight, parameter in learned.local():
        if ".lora_A." not in weight.megatron:
            generator = torch.Generator().manual_seed(sum(weight.hf[0].encode()))
            values = 0.2 * torch.randn(weight.shapes[0], generator=generator)
            for piece in weight.megatron_pieces(*learned.tensor_split(weight)):
                parameter[index(piece.local_box)] += values[index(piece.hf_box)]
    trainer.optimizer.reload_model_params()


def whole(weights) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights}


def results(config: Config, layout: list[int], device) -> dict:
    """Return log-probs before and after `fill` and of the reference, the gradient of the negative sum of the
    log-probs, its norm, the adapters, the merged weights and the bytes of the optimizer's state.
    """
    tp, pp, ep, *_ = layout
    hf = hf_config_of(config, run_models(config)["policy"], read_hf_config(config.model.path))
    etp = config.training.shard or config.training.expert_tp
    trainer = build_policy(config, hf, new_grid(tp, pp, ep, etp), device)
    batch = random_batch(hf["vocab_size"])
    halves = ([0, 1, 2, 3], [4, 5, 6, 7])
    plans = [plan_minibatch(batch, half, dp=trainer.grid.dp, max_tokens=96) for half in halves]
    (start,) = trainer.forward(batch, plans, ("logprobs",))
    base = whole(full_weights(trainer.weight_map))
    fill(trainer)
    (logprobs,) = trainer.forward(batch, plans, ("logprobs",))
    with trainer.reference_weights():
        (reference,) = trainer.forward(batch, plans, ("logprobs",))
    before, merged = whole(full_weights(trainer.learned_map)), whole(trainer.full_weights())

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum()
        return loss, {"loss": loss}

    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)
    result = trainer.update(batch, plan, minus_logprobs, lr=EPS)
    after = whole(full_weights(trainer.learned_map))
    unchanged = whole(full_weights(trainer.weight_map))
    assert all(torch.equal(unchanged[name], tensor) for name, tensor in base.items())
    return {
        "start": start,
        "logprobs": logprobs,
        "reference": reference,
        "adapters": before,
        "base": base,
        "merged": merged,
        "gradient": {name: before[name] - tensor for name, tensor in after.items()},
        "norm": result.grad_norm,
        "state_bytes": sum(tensor.nbytes for tensor in optimizer_tensors(trainer.optimizer)),
    }


def resume(overrides: list[str], out_dir: str, other: str, device) -> dict:
    """Return the largest differences after a resume from a checkpoint that TP 2 wrote, by dtype and layout:
    of the adapters, the merged weights, and the adapters after the next step; and the errors of a resume
    with another scale and with other base weights.
    """
    found: dict = {}

    def trainer_of(layout: str, *options: str):
        keys = zip(("tp", "pp"), map(int, layout.split("x")))
        sizes = [f"training.{key}={n}" for key, n in keys]
        config = resolve(load(Config, None, [*OPTIONS, *overrides, *KIND, *sizes, *options]))
        grid = new_grid(config.training.tp, config.training.pp)
        return build_policy(config, read_hf_config(config.model.path), grid, device)

    def step(trainer) -> None:
        plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)
        trainer.update(batch, plan, lambda micro: (-micro.logprobs.sum() / 100, {}), lr=1e-3)

    def state(trainer) -> tuple[dict, dict]:
        return whole(full_weights(trainer.learned_map)), whole(trainer.full_weights())

    for dtype in ("bfloat16", "float32"):
        options = (f"model.dtype={dtype}", "training.optimizer={lr: 1e-3, eps: 1e-2, clip_grad: 1.0}")
        store = CheckpointStore(Config(run=Run(dir=f"{out_dir}/{dtype}")))
        trainer = trainer_of("2x1", *options)
        batch = random_batch(trainer.weight_map.hf["vocab_size"])
        step(trainer)
        store.save(1, {"policy": trainer}, {})
        saved = state(trainer)
        step(trainer)
        expected = (*saved, state(trainer)[0])
        for layout in ("2x1", "1x2", "1x1"):
            trainer = trainer_of(layout, *options)
            store.load(store.newest(), {"policy": trainer}, seed=0)
            loaded = state(trainer)
            step(trainer)
            pairs = zip((*loaded, state(trainer)[0]), expected, strict=True)
            found[f"{dtype} {layout}"] = [furthest(a, b) for a, b in pairs]
    for name, changed in (("scale", "adapter.alpha=3"), ("base", f"model.path={other}")):
        try:
            store.load(store.newest(), {"policy": trainer_of("2x1", *options, changed)}, seed=0)
        except (ConfigError, WronglyLoaded) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def furthest(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def main(checkpoint: str, out_dir: str, *cases: str) -> None:
    def found(how: str, device) -> dict:
        sizes, *options = how.split(";")
        if sizes == "resume":
            return resume([f"model.path={checkpoint}"], out_dir, *options, device)
        layout = [int(size) for size in sizes.split("x")]
        keys = zip(("tp", "pp", "ep", "etp"), layout)
        overrides = [f"model.path={checkpoint}", *(f"training.{key}={n}" for key, n in keys)]
        return results(resolve(load(Config, None, [*OPTIONS, *overrides, *options])), layout, device)

    run_cases(out_dir, cases, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
