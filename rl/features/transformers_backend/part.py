"""The part of a training engine that builds a class of transformers, and compares it on a row with itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl.config.run_models import RunModel
from rl.config.schema import Config, Training
from rl.faults.agreement import fail_together
from rl.features.transformers_backend.attention import NAME
from rl.features.transformers_backend.model import ClassModel, ClassPolicy, ClassValues
from rl.models import value_model
from rl.training.attention import PackedRow
from rl.training.grid import Grid
from rl.training.parts import TrainerPart
from rl.training.rows import RowGroup, positions, row_attention, segments
from rl.training.spec import ModelSpec

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine

log = logging.getLogger(__name__)
WINDOW = 12
"""Number of tokens of windows in `check_rows`, fewer than its sequences have."""
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Maximum relative difference of the logits of a packed row from those of the class, in the 2-norm."""


class ByClass(TrainerPart):
    """Builds the model's class and refuses it if it computes otherwise on packed rows."""

    def build(self, spec: ModelSpec, training: Training, dtype: torch.dtype, grid: Grid) -> list[Any] | None:
        if spec.has_values:
            return [ClassValues(value_model(spec.hf), training, dtype, grid, values=True)]
        return [ClassPolicy(spec.hf, training, dtype, grid)]

    def weight_grid(self, grid: Grid) -> Grid:
        return grid.with_shards()

    def attach(self, engine: "TrainingEngine") -> None:
        model: Any = engine.model
        engine.shares_prompts &= not model.caps_scores
        with fail_together():
            check_rows(model, engine.device.torch, share=engine.shares_prompts)
        log.info(
            "training.backend=transformers: the model trains as its class %s; %d ranks hold each copy of its "
            "weights, gradients and optimizer state",
            engine.spec.hf["architectures"][0],
            engine.grid.etp,
        )


@torch.no_grad()
def check_rows(model: ClassModel, device: torch.device, *, share: bool) -> None:
    """Raise ValueError if a packed row has other results than the class's own pass over each sequence.

    The results are logits, or hidden states in a value model. The class's own come from its eager attention,
    one sequence at a time, with the class's own head. share: two of the sequences share a prompt on the row.
    """
    generator = torch.Generator().manual_seed(1)
    vocabulary, own = model.hf["vocab_size"], model.language_model
    tokens = torch.randint(vocabulary, (55,), generator=generator).to(device)
    groups = [RowGroup(0, 8, (7, 9)), RowGroup(24, 31)] if share else [RowGroup(0, 24), RowGroup(24, 31)]
    parts = [[*range(15)], [*range(8), *range(15, 24)]] if share else [[*range(24)]]
    keys = {name: torch.from_numpy(array).to(device) for name, array in segments(groups).items()}
    places = torch.from_numpy(positions(groups)).to(device)[None]
    row = PackedRow(attention=row_attention(groups, keys, device), position_ids=places)
    with _short_windows(own):
        found = model.hidden(tokens[None], row)
        if isinstance(model, ClassPolicy):
            cap, found = model.hf.get("final_logit_softcapping"), found @ model.head_weight.T
            found = (cap * torch.tanh(found / cap) if cap else found)[:, :vocabulary]
        own.set_attn_implementation("eager")
        for part in (*parts, [*range(24, 55)]):
            options = dict(input_ids=tokens[part][None], use_cache=False)
            if isinstance(model, ClassPolicy):
                expected = own(**options).logits[0, :, :vocabulary]
            else:
                expected = own.base_model(**options).last_hidden_state[0]
            worst = _difference(found[part], expected)
            if not worst <= LIMIT[found.dtype]:
                raise ValueError(
                    f"{type(own).__name__} of transformers has other logits on a packed row than on single "
                    f"sequences (relative difference {worst:.2g}): it scales its head, mixes tokens or "
                    "numbers positions in a way that this program does not know; use another model."
                )


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Give all layers with a window one of WINDOW tokens, and restore the model's attention afterwards.

    The class's own attention reads the window from the config, attention over rows from the layer's keyword.
    """
    holders = [x for x in (model.config, *model.modules()) if getattr(x, "sliding_window", None) is not None]
    kept = [(holder, holder.sliding_window) for holder in holders]
    for holder, window in kept:
        holder.sliding_window = min(window, WINDOW)
    try:
        yield
    finally:
        for holder, window in kept:
            holder.sliding_window = window
        model.set_attn_implementation(NAME)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference of logits, without what a shift of all logits of a token changes."""
    found, expected = (x.double() - x.double().mean(-1, keepdim=True) for x in (found, expected))
    return float((found - expected).norm() / expected.norm())


def parts(config: Config, model: RunModel, base_of: Any) -> list[TrainerPart]:
    """Return the part of a model of the training grid."""
    return [ByClass()]
