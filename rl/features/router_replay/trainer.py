"""Router replay: a policy's passes use experts that were chosen before, by the engine or by an earlier pass.

Only the choice is replayed. The weights of the chosen experts are the present router's, from its scores at
these indices, and the gradient flows through them.

Megatron's RouterReplay hands out the indices from global lists, first in, first out. Routers are called in
another order: for example, 1F1B runs later micro-batches forward before the backward pass of earlier ones,
and recomputation calls the router again in the backward pass (verl #7805). Here the routes belong to the
micro-batch. A layer gives its router the routes of its packed row before every call, also in a recomputation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rl.config.run_models import RunModel
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.models import architecture
from rl.models.placement import chunk_ranges
from rl.runtime.collectives import gather_texts, sum_over_world
from rl.runtime.names import listed
from rl.training.packing import MicroBatch
from rl.training.parts import TrainerPart, WrongInputs

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


MAX_MISMATCH, MAX_OF_NEIGHBOURS = 0.2, 0.9
"""Limits on the share of (token, layer) with other experts than the present router's: one absolute, one
relative to the share with the neighbouring token's routes. Rounding changes few choices and updates some, but
routes of other tokens, layers or samples fit no better than a neighbour's."""


class WrongRoutes(WrongInputs):
    """Raised on every rank if replayed routes do not belong to the tokens of the batch."""


@dataclass
class Routes:
    """Experts of the tokens of one micro-batch on this rank.

    T: tokens of the row, or this tensor parallel rank's part of them under sequence parallelism. L: layers of
    this pipeline stage that are mixtures of experts.
    """

    experts: Tensor
    """In the smallest sufficient integer type, [L, T, k]."""
    given: Tensor
    """bool [T, 1] or []: tokens with given experts. Others, such as padding, have the router's own choice."""
    chosen: set[int] = field(default_factory=set)
    """Layers with a choice in `experts`."""
    counts: Tensor | None = None
    """Numbers of given tokens by layer, float64 [4, L]; the first pass over a layer adds to it. Rows 0 to 2:
    tokens for which the present router selects other experts than the given experts of this token, of the
    token before, and of the token after. Row 3: all given tokens. None: not counted."""
    counted: set[int] = field(default_factory=set)
    """Layers that `counts` includes."""

    def choose(self, layer: int, own: Tensor) -> Tensor:
        """Return the experts to use, int64 [T, k]. own: the present router's choice, int64 [T, k]."""
        if layer not in self.chosen:
            self.chosen.add(layer)
            self.experts[layer] = own.to(self.experts.dtype)
            return own
        chosen = torch.where(self.given, self.experts[layer].long(), own)
        if self.counts is not None and layer not in self.counted:
            self.counted.add(layer)
            given, own_sets = self.given.flatten(), own.sort().values
            sets = chosen.sort().values
            others = [(given & (sets.roll(shift, 0) != own_sets).any(-1)).sum() for shift in (0, 1, -1)]
            self.counts[:, layer] += torch.stack([*others, given.sum()])
        return chosen


class LayerReplay:
    """Gives a router its choice of experts (`TopKRouter.router_replay`), in place of Megatron's class."""

    def __init__(self, layer: int):
        self.layer = layer
        self.routes: Routes | None = None
        """Routes of the micro-batch that the layer computes; None: the router chooses."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the experts to use, [T, k] each. scores: [T, E]."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.routes is None:
            return values, own
        chosen = self.routes.choose(self.layer, own)
        return scores.gather(1, chosen), chosen


class RouterReplay(TrainerPart):
    """The routes of one policy on this rank. mode: "engine" or "old_policy" (`training.router_replay`)."""

    def __init__(self, mode: str):
        self.mode = mode

    def attach(self, engine: "TrainingEngine") -> None:
        """Give the routers of this rank their choice of experts. Not collective."""
        grid, self._device = engine.grid, engine.device.torch
        self._config, hf = engine.chunks[0].config, engine.weight_map.hf
        frequencies = architecture(hf).megatron_config(hf)["moe_layer_freq"]  # by layer of the whole model
        self._parts = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        self._part = grid.tp_rank if self._parts > 1 else 0
        before = list(accumulate(frequencies, initial=0))  # layers of experts before each layer
        self._stages = [
            [i for first, stop in chunks for i in range(before[first], before[stop])]
            for chunks in chunk_ranges(len(frequencies), grid.pp, grid.vpp)
        ]
        layers = [
            layer
            for chunk in engine.chunks
            for layer in chunk.decoder.layers
            if isinstance(layer.mlp, MoELayer)
        ]
        self._stage = grid.pp_rank
        self._num_layers = len(self._stages[self._stage])
        assert self._num_layers == len(layers), "the stages hold other layers than planned"
        self._replays = [LayerReplay(number) for number in range(len(layers))]
        for number, layer in enumerate(layers):
            layer.mlp.router.router_replay = self._replays[number]
            layer.register_forward_pre_hook(_give_routes, with_kwargs=True)
        self._counts = torch.zeros(4, self._num_layers, dtype=torch.float64, device=self._device)
        """`Routes.counts` of the engine's routes since the last call of `metrics`."""
        self.needs = {"routes": self.need} if self.mode == "engine" else {}

    def check(self, engine: "TrainingEngine", name: str) -> None:
        """Check that replayed experts get their own scores: here the score of expert i is i.

        Raises WrongRoutes on every rank. Collective over the world.
        """
        experts = torch.arange(self._config.num_moe_experts, device=self._device)[None]
        given, wrong = experts[:, : self._config.moe_router_topk], list[str]()  # a router prefers the last
        every, is_given = given.expand(self._num_layers, 1, -1), torch.tensor(True, device=self._device)
        for replay in self._replays:
            before, layers = replay.routes, set(range(self._num_layers))
            replay.routes = Routes(every, is_given, chosen=layers)
            size = given.shape[1], None, None
            found = replay.get_replay_topk(experts.float(), *size, lambda scores, k, *_: scores.topk(k))
            replay.routes = before
            if any((values != given).any() for values in found):
                wrong.append(f"layer {replay.layer} on rank {dist.get_rank()}")
        if texts := gather_texts(wrong):
            raise WrongRoutes(f"replayed experts have weights of other experts in {listed(texts)}.")

    def need(self, stage: int) -> Sequence[int] | None:
        """Return the part of a token's routes that a pipeline stage needs: its layers of experts."""
        return self._stages[stage] or None

    def row(self, batch: Batch, row: MicroBatch, *, is_reference: bool) -> MicroBatch:
        """Return the row with the routes for a pass over it.

        With mode "engine" the reference policy uses the engine's routes too, so that the divergence of equal
        weights is 0. With "old_policy" the policy's first pass records the routes, and the reference policy
        chooses its own. The routes are stored in `row`, which must be the object that the batch caches
        (`lay_out`). In the contexts of a self-taught policy the router chooses: the engine routed other
        tokens.
        """
        chooses = is_reference if self.mode == "old_policy" else not batch.expects_held
        if not self._num_layers or chooses:
            return replace(row, extras=row.extras.without(Routes))
        routes = row.extras.get(Routes)
        if routes is None:
            routes = self._recorder(row) if self.mode == "old_policy" else self._given(batch, row)
            row.extras = row.extras.plus(routes)
        return replace(row, extras=row.extras.plus(replace(routes, counts=None))) if is_reference else row

    def _recorder(self, row: MicroBatch) -> Routes:
        """Return routes that the first pass fills."""
        num_tokens, device = row.tokens.numel() // self._parts, row.tokens.device
        dtype = torch.uint8 if self._config.num_moe_experts <= 256 else torch.int16
        shape = self._num_layers, num_tokens, self._config.moe_router_topk
        return Routes(torch.zeros(shape, dtype=dtype, device=device), torch.tensor(True, device=device))

    def _given(self, batch: Batch, row: MicroBatch) -> Routes:
        """Return the engine's routes of the row's tokens.

        A prompt that several samples share has the routes of one sample: the first one that began with the
        newest weights. The last sampled token and later ones may have no routes, because they predict
        nothing.
        """
        column, num_tokens, device = batch.held["routes"], row.tokens.numel(), row.tokens.device
        size = self._num_layers, self._config.moe_router_topk
        own = np.arange(num_tokens) if row.part is None else row.part.positions
        width = num_tokens if row.part is None else len(row.part.order)
        experts = np.zeros((width, *size), column.dtype)
        given = np.zeros((width, 1), np.bool_)
        versions = batch.weight_versions
        begun = torch.zeros(len(batch)) if versions is None else versions[batch.offsets[:-1]]
        assert row.starts is not None
        places = reversed(list(zip(row.samples, *row.starts)))
        for sample, start, first in sorted(places, key=lambda place: int(begun[place[0]])):
            prompt, response = len(batch.prompt_ids[sample]), len(batch.response_ids[sample])
            index = np.concatenate([np.arange(start, start + prompt), np.arange(first, first + response)])
            values, of_sample = column.local[sample], batch.tokens_of([sample])
            sampled = np.arange(response) if batch.turns is None else (batch.turns[of_sample] > 0).nonzero()
            index = index[: prompt + int(sampled[-1]) if len(sampled) else 0]
            if values.shape != (len(index), *size):
                raise RuntimeError(
                    f"the routes of sample {sample} have the shape {values.shape}, but a sample of {prompt} "
                    f"and {response} tokens needs {(len(index), *size)} on a stage with {size[0]} layers of "
                    "experts."
                )
            experts[index], given[index] = values, True
        part = own[self._part * num_tokens // self._parts : (self._part + 1) * num_tokens // self._parts]
        return Routes(
            torch.from_numpy(experts[part].transpose(1, 0, 2).copy()).to(device),
            torch.from_numpy(given[part]).to(device),
            chosen=set(range(self._num_layers)),
            counts=self._counts,
        )

    def metrics(self) -> dict[str, float]:
        """Return the share of (token, layer) with other experts than the old policy would have chosen.

        It covers the engine's routes since the last call. Collective over the world.
        """
        if not self.needs:
            return {}
        of_all = torch.zeros(4, sum(map(len, self._stages)), dtype=torch.float64)
        of_all[:, self._stages[self._stage]] = self._counts.cpu()
        of_all = sum_over_world(of_all, self._device).cpu()
        self._counts.zero_()
        given = of_all[3].clamp(min=1.0)
        share, of_neighbours = of_all[0] / given, of_all[1:3].min(0).values / given
        mismatch = float((share * given).sum() / given.sum())
        wrong = (share > MAX_MISMATCH) & (share > MAX_OF_NEIGHBOURS * of_neighbours)
        if wrong.any():
            worst = int(torch.where(wrong, share, -1.0).argmax())
            raise WrongRoutes(
                f"the present router chooses other experts for {float(share[worst]):.0%} of the tokens in "
                f"layer {worst} of those with experts, and for {mismatch:.0%} in all of them, than those "
                "recorded for the engine, and in that layer for "
                f"{float(of_neighbours[worst]):.0%} than those of the neighbouring token: the routes of "
                f"{int(wrong.sum())} of {len(share)} layers are those of other tokens, layers or samples."
            )
        return {"training/router_mismatch": mismatch}


def _give_routes(layer: Any, arguments: tuple, options: dict[str, Any]) -> None:
    layer.mlp.router.router_replay.routes = options["packed_seq_params"].extras.get(Routes)


def parts(config: Config, model: RunModel, base_of: "TrainingEngine | None") -> list[TrainerPart]:
    """Return the parts of a model in training."""
    return [RouterReplay(config.training.router_replay)] if model.name == "policy" else []
