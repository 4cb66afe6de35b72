"""Adapters of experts on Transformer Engine's grouped layers, together and one expert after the other.

    te_experts_worker.py MODEL KIND

By the stand-ins of tests/rehearsal. Prints a line of JSON for each layer and dtype (`compare`). The process
must be a new interpreter.
"""

import json
import sys

from tests.ranks.training import te_adapter_worker  # installs the stand-ins

# isort: split
import torch

from rl.config.adapter import Adapter
from rl.config.schema import Training
from rl.features.adapters.layers import grouped_hook
from rl.features.adapters.trainer import Adapters
from rl.models import read_hf_config
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.spec import ModelSpec
from tests.ranks.training.megatron_groups import new_grid

SPLITS = list(te_adapter_worker.SPLITS)
VIEWS = (
    "split",
    "narrow",
    "slice",
    "select",
    "detach",
    "alias",
    "view",
    "expand",
    "as_strided",
    "permute",
    "empty",
)


def one_by_one(sums):
    """Return a hook that adds the adapters of one expert after the other."""

    def hook(module, args, output):
        x, splits = args
        out, bias = output
        parts = zip(sums, x.split(splits), out.split(splits), strict=True)
        return torch.cat([expert.add(tokens, own, None) for expert, tokens, own in parts]), bias

    return hook


def passes(module, hook) -> tuple[list[torch.Tensor], int]:
    """Return a hook's output and gradients, and how many operations that are not views they take."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = module.weight0.shape
    x, out, weights = (
        torch.randn(sum(SPLITS), width, generator=generator).to(torch.bfloat16).to(module.weight0.dtype)
        for width in (columns, rows, rows)
    )
    learned = [parameter for name, parameter in module.named_parameters() if "lora" in name]
    with torch.profiler.profile() as profile:
        total, _ = hook(module, (x.requires_grad_(), SPLITS), (out.requires_grad_(), None))
        gradients = torch.autograd.grad(total, [x, out, *learned], weights)
    roots = [event for event in profile.events() if event.cpu_parent is None]
    return [total.detach(), *gradients], sum(map(count, roots))


def count(event) -> int:
    """Return the operations within a profiler's event that are not views.

    A grouped product, which calls others on a CPU, is two on a GPU: the kernel, and its table of pointers.
    """
    if event.name == "aten::_grouped_mm":
        return 2
    if event.cpu_children:
        return sum(map(count, event.cpu_children))
    return event.name.removeprefix("aten::") not in VIEWS


def compare(module, sums) -> dict:
    """Return the largest relative difference of both hooks from the second in float64, and more."""
    together, each = grouped_hook(sums), one_by_one(sums)
    found, again, single = passes(module, together), passes(module, together), passes(module, each)
    dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
    exact, _ = passes(module.double(), each)
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    gaps = [
        max(float((a.double() - b).norm() / (b.norm() or 1)) for a, b in zip(values, exact))
        for values, _ in (found, single)
    ]
    return {
        "dtype": str(found[0][0].dtype),
        "gaps": gaps,
        "operations": [found[1], single[1]],
        "repeats": all(map(torch.equal, found[0], again[0])),
    }


def main(checkpoint: str, kind: str) -> None:
    with session(te_adapter_worker.RANKS) as device:
        spec = ModelSpec(checkpoint, read_hf_config(checkpoint), "bfloat16")
        part = Adapters(Adapter(kind=kind, rank=4, alpha=8.0), seed=0)
        trainer = TrainingEngine(spec, Training(), new_grid(1, 1), device, [part])
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora" in name:
                    parameter.normal_(std=0.2)
        experts = trainer.model.decoder.layers[1].mlp.experts
        for layer, name in ((experts.linear_fc1, "gate_proj"), (experts.linear_fc2, "down_proj")):
            of_layer = {hf[0]: own for hf, own in part._sums.items() if name in hf[0] and "experts." in hf[0]}
            sums = [of_layer[f"model.layers.1.mlp.experts.{e}.{name}.weight"] for e in range(len(SPLITS))]
            for dtype in (torch.bfloat16, torch.float32):
                print(json.dumps(compare(layer.to(dtype), sums)))


if __name__ == "__main__":
    main(*sys.argv[1:])
