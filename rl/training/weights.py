"""The weights of the training model in and out, through the layouts of `rl.models.layout`.

In: each rank reads from the safetensors files only the boxes that it holds. Out: `full_weights` gives every Hugging Face
tensor whole on every rank, one after the other.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from rl.models.files import tensor_files
from rl.models.layout import Weight, assemble, index
from rl.training.grid import Grid
from rl.training.layer_spec import te_name


class WeightMap:
    """Which of the model's weights this rank holds, and as which parameter."""

    def __init__(self, hf: dict, weights: list[Weight], grid: Grid, model: torch.nn.Module):
        self.grid = grid
        self.num_layers = hf["num_hidden_layers"]
        self.weights = weights
        self.parameters = dict(model.named_parameters())
        held = {self.local_name(w, stage) for w in self.weights for stage in self.stages(w) if stage == grid.pp_rank}
        unmapped, absent = self.parameters.keys() - held, held - self.parameters.keys()
        assert not unmapped and not absent, f"layout of {hf['architectures'][0]}: unmapped {unmapped}, absent {absent}"

    def stages(self, weight: Weight) -> list[int]:
        """Pipeline stages that hold the weight, its owner first."""
        last = self.grid.pp - 1
        if weight.layer is not None:
            return [self.grid.stage_of_layer(weight.layer, self.num_layers)]
        if not weight.first_stage:
            return [last]
        return [0, last] if weight.tied_to_head and last > 0 else [0]

    def local_name(self, weight: Weight, stage: int) -> str:
        """Name of the weight's parameter on a stage that holds it."""
        if weight.layer is not None:
            name = weight.megatron.format(layer=weight.layer - stage * (self.num_layers // self.grid.pp))
        else:
            name = weight.megatron if stage == self.stages(weight)[0] else "output_layer.weight"
        return name if name in self.parameters else te_name(name)

    def local(self) -> Iterator[tuple[Weight, torch.nn.Parameter]]:
        """Weights that this rank holds and their parameters; a tied embedding counts on both its stages."""
        for weight in self.weights:
            if self.grid.pp_rank in self.stages(weight):
                yield weight, self.parameters[self.local_name(weight, self.grid.pp_rank)]


@torch.no_grad()
def load_hf(directory: str, weight_map: WeightMap) -> None:
    """Fill this rank's parameters from the safetensors files of a checkpoint; padding rows of the vocabulary become 0.

    Raises ValueError as `tensor_files` does. Not collective.
    """
    files = tensor_files(directory, weight_map.weights)
    grid, opened = weight_map.grid, {}
    for weight, parameter in weight_map.local():
        parameter.zero_()
        for piece in weight.megatron_pieces(grid.tp, grid.tp_rank):
            path = files.get(piece.hf)
            if path is None:
                continue  # optional, and stays 0
            if path not in opened:
                opened[path] = safe_open(path, framework="pt")
            tensor = opened[path].get_slice(piece.hf)
            parameter[index(piece.local_box)] = tensor[index(piece.hf_box)].to(parameter)


@torch.no_grad()
def full_weights(weight_map: WeightMap) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor) of every weight, in the model's order, on every rank.

    Per weight: all-gather over the owner stage's tensor parallel group, broadcast over the pipeline group. Collective
    over the model parallel groups: every rank must draw to the end.
    """
    grid = weight_map.grid
    dtype = next(iter(weight_map.parameters.values())).dtype
    device = next(iter(weight_map.parameters.values())).device
    for weight in weight_map.weights:
        owner = weight_map.stages(weight)[0]
        shards_needed = grid.tp if weight.cut.split else 1
        if grid.pp_rank == owner:
            mine = weight_map.parameters[weight_map.local_name(weight, owner)].detach().contiguous()
            shards = mine.new_empty((shards_needed, *mine.shape))
            if shards_needed > 1:
                dist.all_gather_into_tensor(shards.view(-1, *mine.shape[1:]), mine, group=grid.groups.tp)
            else:
                shards[0] = mine
        else:
            shards = torch.empty((shards_needed, *weight.megatron_shape(grid.tp)), dtype=dtype, device=device)
        if grid.pp > 1:
            dist.broadcast(shards, group=grid.groups.pp, group_src=owner)
        yield from assemble(weight, list(shards)).items()
