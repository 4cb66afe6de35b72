"""Adapters on layers of Transformer Engine, by the stand-ins of tests/rehearsal: te_adapter_worker.py MODEL.

Prints the largest relative difference of a layer's output from W x + scale * B A x. The process must be a new
interpreter.
"""

import sys

from rl.runtime.ranks import discover
from tests.rehearsal import cuda_stand_in, te_stand_in

te_stand_in.install()
cuda_stand_in.install()

from train_rl import prepare_environment  # noqa: E402

RANKS = discover()
prepare_environment(RANKS)

import torch  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron_groups import new_grid  # noqa: E402

from rl.config.adapter import Adapter  # noqa: E402
from rl.config.schema import Training  # noqa: E402
from rl.features.adapters.trainer import Adapters  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.models.adapters import PREFIX  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.engine import TrainingEngine  # noqa: E402
from rl.training.spec import ModelSpec  # noqa: E402
from rl.training.weights import full_weights  # noqa: E402

SPLITS = (3, 0, 5, 1, 2, 0, 4, 1)
"""Tokens of each expert."""
for name in ("permute", "unpermute", "sort_chunks_by_index"):  # Megatron requires them; no layer here does
    for suffix in ("", "_with_probs"):
        setattr(moe_utils, f"fused_{name}{suffix}", NotImplemented)


def main(checkpoint: str) -> None:
    with session(RANKS) as device, torch.no_grad():
        adapter = Adapter(kind="lora", rank=4, alpha=8.0)
        spec = ModelSpec(checkpoint, read_hf_config(checkpoint), "bfloat16")
        trainer = TrainingEngine(spec, Training(), new_grid(1, 1), device, [Adapters(adapter, seed=0)])
        for parameter in trainer.learned:
            parameter.normal_(std=0.2)
        tensors = dict(full_weights(trainer.weight_map)) | dict(full_weights(trainer.learned_map))

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            name = f"model.layers.{name}"
            a, b = (tensors[f"{PREFIX}{name}.lora_{side}.weight"].double() for side in "AB")
            return x.double() @ (tensors[f"{name}.weight"].double() + adapter.scale * b @ a).T

        worst = 0.0
        dense, experts = (layer.mlp for layer in trainer.model.decoder.layers)
        assert type(dense.linear_fc1).__name__ == "TEColumnParallelLinear"
        for module, names in (
            (dense.linear_fc1, ("0.mlp.gate_proj", "0.mlp.up_proj")),
            (dense.linear_fc2, ("0.mlp.down_proj",)),
            (experts.experts.linear_fc1, ("1.mlp.experts.{}.gate_proj", "1.mlp.experts.{}.up_proj")),
            (experts.experts.linear_fc2, ("1.mlp.experts.{}.down_proj",)),
        ):
            is_grouped = "{}" in names[0]
            splits = list(SPLITS) if is_grouped else [sum(SPLITS)]
            width = tensors[f"model.layers.{names[0].format(0)}.weight"].shape[1]
            x = torch.randn(sum(splits), width, dtype=torch.bfloat16)
            out, _ = module(x, splits) if is_grouped else module(x)
            parts = enumerate(x.split(splits))
            expected = torch.cat(
                [torch.cat([linear(name.format(e), part) for name in names], 1) for e, part in parts]
            )
            worst = max(worst, float((out.double() - expected).norm() / expected.norm()))
        print(worst)


if __name__ == "__main__":
    main(*sys.argv[1:])
