"""Load and gather the weights of the training model through the layouts of `rl.models.layout`.

`load_hf` reads on each rank only the boxes that the rank holds. `full_weights` yields every Hugging Face
tensor whole on every rank, one at a time. `mark_split_weights` tells Megatron which weights are split.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl.models.boxes import Box, index
from rl.models.files import TensorReader, tensor_files
from rl.models.fp8_blocks import dequantised
from rl.models.layout import FP8_BLOCK, Piece, Weight, assemble
from rl.models.placement import TrainingPlacement, count_experts
from rl.training.grid import Grid
from rl.training.layer_spec import te_name


class WeightMap:
    """The model's weights that this rank holds, and their parameters."""

    def __init__(
        self,
        hf: dict,
        weights: list[Weight],
        grid: Grid,
        model: torch.nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.hf = hf
        self.grid = grid
        self.weights = weights
        self.dtype, self.device = dtype, device
        """dtype of all weights that are not `float32`, and device on which the model computes."""
        self.placement = TrainingPlacement(
            grid.tp * grid.pp * grid.replicas,
            grid.tp,
            grid.pp,
            hf["num_hidden_layers"],
            ep=grid.ep,
            etp=grid.etp,
            num_experts=count_experts(weights),
            vpp=grid.vpp,
        )
        parameters = dict(model.named_parameters())
        self.parameters = parameters | dict(model.named_buffers())
        held = {self.local_name(weight, grid.pp_rank) for weight in self.weights if self.holds(weight)}
        unmapped, absent = parameters.keys() - held, held - self.parameters.keys()
        assert not unmapped and not absent, (
            f"layout of {hf['architectures'][0]}: unmapped {unmapped}, absent {absent}"
        )
        self.parameters = {name: self.parameters[name] for name in held}
        """This rank's parameters, and buffers that are weights (a router's bias), by Megatron's name."""

    def over(self, weights: list[Weight], parameters: dict[str, Tensor]) -> "WeightMap":
        """Return a map of other weights of the same model. parameters: this rank's parameters, by name."""
        other = copy.copy(self)
        other.weights, other.parameters = weights, parameters
        return other

    def holds(self, weight: Weight) -> bool:
        """Return whether this rank holds the weight or its tensor parallel part."""
        place = self.placement.place(weight)
        return self.grid.pp_rank in place.stages and place.ep_rank in (None, self.grid.ep_rank)

    def tensor_split(self, weight: Weight) -> tuple[int, int]:
        """Return the number of ranks over which the weight is split, and this rank's index.

        Routed experts use their own tensor parallel group.
        """
        grid = self.grid
        return (grid.tp, grid.tp_rank) if weight.expert is None else (grid.etp, grid.etp_rank)

    def local_name(self, weight: Weight, stage: int) -> str:
        """Return the name of the weight's parameter on a rank of that stage that holds it."""
        placement = self.placement
        part = placement.part(weight, stage)
        if weight.tied_to_head and stage != self.placement.place(weight).stages[0]:
            name = "output_layer.weight"
        else:
            layer = None if weight.layer is None else weight.layer - placement.ranges[part][0]
            per_rank = placement.num_experts // placement.ep
            expert = None if weight.expert is None else weight.expert % per_rank
            name = weight.megatron.format(layer=layer, expert=expert)
        if placement.vpp > 1:
            name = f"{part // placement.pp}.{name}"
        return name if name in self.parameters else te_name(name)

    def parameter(self, weight: Weight) -> Tensor:
        """Return the parameter of a weight that this rank holds."""
        return self.parameters[self.local_name(weight, self.grid.pp_rank)]

    def pieces(self, weight: Weight) -> list[Piece]:
        """Return the pieces of Hugging Face tensors in this rank's parameter of a weight."""
        return weight.megatron_pieces(*self.tensor_split(weight))

    def is_counted(self, weight: Weight) -> bool:
        """Return whether a sum over the ranks of one replica counts this rank's part of a weight.

        Copies are not counted: the last stage's copy of a tied embedding, and copies of an unsplit weight on
        all tensor parallel ranks but the first. For example, with training.tp=2 a norm's weight counts on
        rank 0 only.
        """
        first = self.placement.place(weight).stages[0] == self.grid.pp_rank
        return first and (weight.cut.split or self.tensor_split(weight)[1] == 0)

    def local(self) -> Iterator[tuple[Weight, Tensor]]:
        """Yield this rank's weights with their parameters.

        A tied embedding is among the weights of both the first and the last stage.
        """
        for weight in self.weights:
            if self.holds(weight):
                yield weight, self.parameter(weight)

    def replicas(self) -> list[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
        """Return (group, parameters by name): data parallel, then expert data parallel for routed experts."""
        groups: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for name, parameter in sorted(self.parameters.items()):
            groups[".experts." in name][name] = parameter
        return list(zip((self.grid.groups.dp_cp, self.grid.groups.expt_dp), groups))


def mark_split_weights(weight_map: WeightMap) -> None:
    """Set Megatron's mark on weights that are split over tensor parallel ranks; clear it on all others.

    Megatron's gradient norm counts a marked weight on every rank and any other weight on the first rank only.
    It does not count a weight marked `shared`. Call this before the optimizer is built. Transformer Engine
    2.11 marks the weight of every linear layer, even of duplicated ones such as MLA's down-projections to the
    latents (`Linear.reset_parameters`).
    """
    parameter: Any  # Megatron's marks are attributes of tensors
    for weight, parameter in weight_map.local():
        parameter.tensor_model_parallel = weight.cut.split
        if weight.expert is not None and not weight.cut.split:
            # Megatron's optimizer counts an unmarked weight on rank 0 of the other layers' tensor parallel
            # group, which may be another rank than rank 0 of the experts' group.
            parameter.tensor_model_parallel = True
            parameter.shared = weight_map.grid.etp_rank > 0
        if weight.expert is not None:  # Megatron would sum an expert's bias over tensor parallel ranks
            parameter.sequence_parallel = False


def sharded(parameter: Any, rows: int) -> None:
    """Mark a parameter as rows of one that is gathered before its layer computes (`Cut.sharded`).

    Its gradient is float32, and reduced over the ranks with the same rows only (`Grid.with_shards`). rows:
    number of rows of the whole.
    """
    parameter.whole_rows, parameter.grad_dtype, parameter.allreduce = rows, torch.float32, False


@torch.no_grad()
def load_hf(directory: str, weight_map: WeightMap) -> None:
    """Fill this rank's parameters from a checkpoint's safetensors files. Not collective.

    Padding rows of the vocabulary become 0. FP8 weights with a scale per block, as in DeepSeek-V3, and
    MXFP4 are dequantised. Raises ValueError as `tensor_files`, and for a value that is NaN, infinite, or
    becomes infinite in the model's dtype.
    """
    files = tensor_files(directory, weight_map.weights)
    reader = TensorReader(files, weight_map.weights)
    for weight, parameter in weight_map.local():
        parameter.zero_()
        for piece in weight_map.pieces(weight):
            if piece.hf not in files:
                continue  # optional: stays 0
            values = reader.read(piece.hf, piece.hf_box)
            if values.dtype is torch.float8_e4m3fn:
                scales = reader.read(piece.hf + "_scale_inv", blocks_of(piece.hf_box)).float()
                values = dequantised(values, scales, piece.hf_box)
            values = values.to(parameter)
            if not values.isfinite().all():
                raise ValueError(
                    f"{files[piece.hf]} has {piece.hf} with NaN or values that are infinite in "
                    f"{str(values.dtype).removeprefix('torch.')}; use another copy of the model, or a "
                    "model.dtype with a wider range."
                )
            parameter[index(piece.local_box)] = values


def blocks_of(box: Box) -> Box:
    """Return the box of 128 x 128 blocks of the matrix that have elements in the box."""
    return tuple((start // FP8_BLOCK, -(-stop // FP8_BLOCK)) for start, stop in box)


@torch.no_grad()
def full_weights(
    weight_map: WeightMap, value: Callable[[Weight, Tensor], Tensor] = lambda weight, parameter: parameter
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) of every weight, in the model's order, on every rank.

    value: maps a weight and its parameter on this rank to the gathered values, of the same shape and dtype.

    Each weight needs an all-gather over the owner's tensor parallel group and a broadcast over the pipeline
    group. A routed expert also needs a broadcast over the expert parallel group of its stage. Every rank must
    exhaust the iterator, because it is collective over these groups.
    """
    grid = weight_map.grid
    device = weight_map.device
    for weight in weight_map.weights:
        place = weight_map.placement.place(weight)
        owner = place.stages[0]
        tp, _ = weight_map.tensor_split(weight)
        group = grid.groups.tp if weight.expert is None else grid.groups.expt_tp
        shards_needed = tp if weight.cut.split else 1
        if grid.pp_rank == owner and weight_map.holds(weight):
            mine = value(weight, weight_map.parameter(weight)).detach().contiguous()
            shards = mine.new_empty((shards_needed, *mine.shape))
            if shards_needed > 1:
                dist.all_gather_into_tensor(shards.view(-1, *mine.shape[1:]), mine, group=group)
            else:
                shards[0] = mine
        else:
            dtype = torch.float32 if weight.float32 else weight_map.dtype
            shards = torch.empty((shards_needed, *weight.megatron_shape(tp)), dtype=dtype, device=device)
        if weight.expert is not None and grid.ep > 1 and grid.pp_rank == owner:
            dist.broadcast(shards, group=grid.groups.ep, group_src=place.ep_rank)
        if grid.pp > 1:
            dist.broadcast(shards, group=grid.groups.pp, group_src=owner)
        yield from assemble(weight, list(shards)).items()
