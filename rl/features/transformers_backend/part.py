"""The part of a training engine that builds a class of transformers, and compares it on a row with itself."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rl.config.run_models import RunModel
from rl.config.schema import Config, Training
from rl.faults.agreement import fail_together
from rl.features.transformers_backend.model import ClassModel, ClassPolicy, ClassValues
from rl.features.transformers_backend.shards import check_sums
from rl.models import value_model
from rl.models.by_class import refusal
from rl.runtime.collectives import any_rank
from rl.training.attention import PackedRow
from rl.training.grid import Grid
from rl.training.parts import TrainerPart
from rl.training.rows import RowGroup, positions, row_attention, segments
from rl.training.spec import ModelSpec

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

log = logging.getLogger(__name__)
WINDOW = 12
"""Number of tokens of windows in `difference`, fewer than its sequences have."""
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Maximum relative difference of the logits of a packed row from those of the class, in the 2-norm."""


class ByClass(TrainerPart):
    """Builds the model's class and refuses it if it computes otherwise on packed rows."""

    def build(self, spec: ModelSpec, training: Training, dtype: torch.dtype, grid: Grid) -> list[Any] | None:
        hf, kind = (value_model(spec.hf), ClassValues) if spec.has_values else (spec.hf, ClassPolicy)
        return [kind(hf, training, dtype, grid)]

    def weight_grid(self, grid: Grid) -> Grid:
        return grid.with_shards()

    def before_update(self) -> None:
        self._shards.sums.zero_()

    def after_step(self, *, norm: float, lr: float) -> list[Tensor]:
        return [self._shards.sums]

    def summed(self, numbers: list[float]) -> None:
        before, after, size = numbers
        check_sums(before, after, size, num_ranks=self._shards.size)

    def attach(self, engine: "TrainingEngine") -> None:
        model, device = cast(ClassModel, engine.model), engine.device.torch
        self._shards = model.shards
        engine.shares_prompts &= model.shares_prompts
        worst, error = _compare(model, device, share=engine.shares_prompts)
        if model.packs and any_rank(not worst <= LIMIT[model.config.params_dtype]):
            model.packs = engine.shares_prompts = False
            model.attend()
            worst, error = _compare(model, device, share=False)
        with fail_together():
            if not worst <= LIMIT[model.config.params_dtype]:
                raise refusal(
                    model.hf,
                    "its logits in a batch differ from its own on single sequences (relative difference "
                    f"{worst:.2g}{error}), because it changes logits, or mixes tokens, in a way of its own",
                )
        pads = (
            "; its layers mix tokens in ways of their own, so that the sequences of a row are padded to the "
            "longest of them, which costs the time and memory of the padding"
        )
        name, shard = type(model.language_model).__name__, engine.grid.etp
        log.info(
            "training.backend=transformers: the model trains as its class "
            f"{name}; training.shard is {shard}{'' if model.packs else pads}"
        )


def _compare(model: ClassModel, device: torch.device, *, share: bool) -> tuple[float, str]:
    """Return the `difference`; NaN and the error if the class cannot compute in this way."""
    try:
        if isinstance(model, ClassPolicy):
            model.find_scale(device)
        return difference(model, device, share=share), ""
    except (RuntimeError, TypeError) as error:  # for example, its attention does not get the row
        return math.nan, f", {type(error).__name__}: {error}"


@torch.no_grad()
def difference(model: ClassModel, device: torch.device, *, share: bool) -> float:
    """Return the largest relative difference of a row's results from the class's own on single sequences.

    The results are logits, or hidden states in a value model. The class's own come from its eager attention,
    one sequence at a time, with the class's own head. share: two of the sequences share a prompt on the row.
    Collective over the ranks of a copy.
    """
    generator = torch.Generator().manual_seed(1)
    vocabulary, own = model.hf["vocab_size"], model.language_model
    tokens = torch.randint(vocabulary, (55,), generator=generator).to(device)
    groups = [RowGroup(0, 8, (7, 9)), RowGroup(24, 31)] if share else [RowGroup(0, 24), RowGroup(24, 31)]
    parts = [[*range(15)], [*range(8), *range(15, 24)]] if share else [[*range(24)]]
    keys = {name: torch.from_numpy(array).to(device) for name, array in segments(groups).items()}
    places = torch.from_numpy(positions(groups)).to(device)[None]
    row = PackedRow(attention=row_attention(groups, keys, device), position_ids=places)
    differences = []
    with _short_windows(own):
        found = model.hidden(tokens[None], row)
        if isinstance(model, ClassPolicy):
            cap, found = model.hf.get("final_logit_softcapping"), found @ model.head_weight.T
            found = (cap * torch.tanh(found / cap) if cap else found)[:, :vocabulary]
        model.attend("eager")
        for part in (*parts, [*range(24, 55)]):
            options = dict(input_ids=tokens[part][None], use_cache=False)
            if isinstance(model, ClassPolicy):
                expected = own(**options).logits[0, :, :vocabulary]
            else:
                expected = model.body(**options).last_hidden_state[0]
            differences.append(relative_difference(found[part], expected))
        model.attend()
    return float(torch.tensor(differences).max())  # NaN if one is


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Give all layers with a window one of WINDOW tokens.

    The class's own attention reads the window from the config, attention over rows from the layer's keyword.
    """
    holders = [x for x in (model.config, *model.modules()) if getattr(x, "sliding_window", None)]
    kept = [(holder, holder.sliding_window) for holder in holders]
    for holder, window in kept:
        holder.sliding_window = min(window, WINDOW)
    try:
        yield
    finally:
        for holder, window in kept:
            holder.sliding_window = window


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference of logits, without what a shift of all logits of a token changes."""
    found, expected = (x.double() - x.double().mean(-1, keepdim=True) for x in (found, expected))
    return float((found - expected).norm() / expected.norm())


def parts(config: Config, model: RunModel, base_of: Any) -> list[TrainerPart]:
    """Return the part of a model of the training grid."""
    return [ByClass()]
