"""Operations of vision towers equal torch's count of operations in the towers of transformers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from rl.config.schema import Config, load_config
from rl.data.batch import Batch
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import Hardware
from rl.dry_run.report import report
from rl.dry_run.shape import SHAPES
from rl.models import architecture
from rl.models.tower_cost import TowerActivations
from rl.phases.minibatches import MinibatchPlanner
from rl.training.micro_batch_plans import Cost, Workload
from tests.checkpoints import VISION, tiny_config


@pytest.mark.parametrize("grid", [(4, 4), (12, 8)])
@pytest.mark.parametrize("name", VISION)
def test_operations_are_those_that_torch_counts(name, grid):
    config = tiny_config(name)
    config._attn_implementation = config.vision_config._attn_implementation = "eager"
    hf = json.loads(config.to_json_string(use_diff=False))
    hf = {**hf["text_config"], **hf}
    cost = Cost.of_model(hf, architecture(hf).weights(hf)).tower
    tower = getattr(transformers, name)(config).model.visual.float()
    vision = hf["vision_config"]
    channels = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    patches = torch.zeros(grid[0] * grid[1], channels)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(patches, grid_thw=torch.tensor([(1, *grid)]))
    # Biases and norms count too, as in the text model.
    assert cost.operations(len(patches) // cost.merged) == pytest.approx(counter.get_total_flops(), rel=0.06)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", VISION)
def test_activations_are_those_that_torch_keeps(name, recomputes):
    config = tiny_config(name)
    vision, (rows, columns) = config.vision_config, (12, 8)
    vision._attn_implementation = "sdpa"
    tower = getattr(transformers, name)(config).model.visual.to(torch.bfloat16).train()
    if recomputes:
        tower.gradient_checkpointing_enable()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in tower.parameters()}
    patches = torch.randn(rows * columns, 3 * vision.temporal_patch_size * vision.patch_size**2)
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(patches.bfloat16(), grid_thw=torch.tensor([(1, rows, columns)]))
    found = sum(size for place, (_, size) in storages.items() if place not in parameters)
    cost = TowerActivations.of_model(json.loads(config.to_json_string(use_diff=False)))
    assert found / 2 / len(patches) == pytest.approx(cost.kept(recomputes=recomputes), rel=0.15)


def test_a_row_costs_what_its_images_and_its_text_do():
    hf = json.loads((SHAPES / "qwen2.5-vl-7b" / "config.json").read_text())
    weights = architecture(hf).weights(hf)
    cost = Cost.of_model(hf, weights)
    text = [weight for weight in weights if not weight.megatron.startswith("visual.")]
    plain = {key: value for key, value in hf.items() if key != "vision_config"}
    assert replace(cost, tower=None) == Cost.of_model(plain, text)
    prompts = [
        SimpleNamespace(images=[SimpleNamespace(num_tokens=n) for n in sizes]) for sizes in ((6, 9), ())
    ]
    ids = [np.arange(20, dtype=np.int32)] * 3
    batch = Batch(ids, ids, torch.tensor([0, 0, 1]), torch.zeros(3, dtype=torch.bool), prompts=prompts)
    images = cost.tower.operations(6) + cost.tower.operations(9)
    for shared, times in ((True, 1), (False, 2)):
        work, of_text = (
            Workload.of_batch(batch, cost=each, shared_prefix=shared)
            for each in (cost, replace(cost, tower=None))
        )
        assert work.cost([0, 1]) - of_text.cost([0, 1]) == times * images
        assert work.cost([2]) == of_text.cost([2])
        only = Workload.of_batch(batch, cost=cost.of_images, shared_prefix=shared)
        assert only.cost([0, 1, 2]) == times * images
    planner = MinibatchPlanner(Config(), 1, cost, shares_prompts=True)
    plans = planner.plans(batch)
    learns, frozen = (Model(hf, weights, has_frozen_weights=own) for own in (False, True))
    forward = planner.operations(batch, plans, learns)
    assert planner.update_operations(batch, plans, learns) == 3 * forward
    assert planner.update_operations(batch, plans, frozen) == 3 * (forward - images) + images
    adapted = Model(hf, weights, has_frozen_weights=True, part="adapters")
    assert planner.update_operations(batch, plans, adapted) == 2 * (forward - images) + images


class Model:
    """The attributes of a training engine that the planner reads."""

    def __init__(self, hf: dict, weights: list, *, has_frozen_weights: bool, part: object = None):
        self.weight_map, self.has_frozen_weights = SimpleNamespace(hf=hf, weights=weights), has_frozen_weights
        self.parts = [SimpleNamespace(freezes_model=part is not None)]


def test_the_dry_run_counts_images():
    keys = ("model.path=qwen2.5-vl-7b", "data.image_key=images", "data.max_prompt_tokens=2048")
    keys += ("algorithm=grpo", "data.train=[a.parquet]", "training.tp=2", "rollout.tp=2")

    def found(*more):
        return estimate(load_config(None, (*keys, *more)), 8, Hardware(), plan=False)

    frozen, learns = found(), found("model.vision=train")
    small = found(f"data.max_pixels={28 * 28 * 256}")
    assert "images: at most 1,024 tokens of a prompt, 802,816 pixels; the tower takes" in report(frozen)
    assert small.seconds["gen"] < frozen.seconds["gen"]
    recomputed = found("model.vision=train", "training.recompute=full")
    kept, lean, least = (each.memory.stages[0].activations for each in (learns, recomputed, frozen))
    assert least < kept and lean < kept / 4
    assert small.seconds["update_actor"] < frozen.seconds["update_actor"] < learns.seconds["update_actor"]
