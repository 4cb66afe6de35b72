"""The models of a run in a dry run: their weights, and the widths that determine memory and time."""

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rl.config.adapter_checks import adapters_of
from rl.config.layout_checks import check_architecture, check_has_experts, check_judge, check_layout
from rl.config.needs import has_prediction_head, needs_engine
from rl.config.options import ConfigError
from rl.config.run_models import RunModel, hf_config_of, run_models
from rl.config.schema import Config
from rl.dry_run.parameters import CountedWeight, count_parameters, group_parts
from rl.models import (
    SUPPORTED,
    architecture,
    check_options,
    merged,
    mtp,
    read_hf_config,
    sizes,
    value_model,
    value_weights,
)
from rl.models.json_files import read_object
from rl.models.layout import Weight

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "models"
"""Directory of published config.json files, for models with checkpoints on other machines."""


DRAFTERS = {"mtp": "mtp", "model": "draft"}
"""`rollout.draft.method` -> name of what proposes the tokens among the models of a run."""


@dataclass(frozen=True)
class ModelShape:
    """One model of the run."""

    run: RunModel
    hf: dict
    weights: tuple[Weight, ...]
    parts: tuple[CountedWeight, ...]
    adapters: tuple[Weight, ...] = ()
    """A, B and with DoRA the lengths of its adapters, and a critic's value head; all that learns. None: all
    weights learn."""
    adapter_parts: tuple[CountedWeight, ...] = ()

    @property
    def num_layers(self) -> int:
        return self.hf["num_hidden_layers"]

    @property
    def num_attentions(self) -> int:
        """Number of layers with attention."""
        return sizes.attention_layers(self.hf)

    @property
    def num_recurrent(self) -> int:
        """Number of layers with a gated delta net."""
        return self.num_layers - self.num_attentions

    @property
    def num_experts(self) -> int:
        """Number of routed experts of a layer; 0 for a dense model."""
        return sizes.num_experts(self.hf)

    @property
    def experts_per_token(self) -> int:
        return self.hf.get("num_experts_per_tok", 0)

    @functools.cached_property
    def has_head(self) -> bool:
        """Whether it is a language model, not a value model."""
        return not any(weight.hf == ("score.weight",) for weight in self.weights)

    @functools.cached_property
    def matrices(self) -> dict[int | None, list[Weight]]:
        """Layer -> its weights with two dimensions or more."""
        found = defaultdict[int | None, list[Weight]](list)
        for weight in (part.weight for part in self.parts):
            if len(weight.shapes[0]) >= 2:
                found[weight.layer].append(weight)
        return found

    @property
    def parameters(self) -> int:
        return count_parameters(self.parts)

    @functools.cached_property
    def routed(self) -> int:
        """Number of parameters of routed experts."""
        return sum(part.elements for part in self.parts if part.weight.expert is not None)

    @functools.cached_property
    def multiplied(self) -> int:
        """Number of parameters in the products of one token.

        Routed experts count only if the token uses them: for example, 8 of 128 in Qwen3-30B-A3B. The token
        embedding counts only if it is also the head, and a vision tower not at all, because only patches of
        images pass it.
        """
        total = 0
        for part in self.parts:
            weight = part.weight
            if weight.is_routed and self.num_experts:
                total += part.elements * self.experts_per_token // self.num_experts
            elif not weight.first_stage or weight.tied_to_head:
                total += part.elements
        return total

    @property
    def heads_width(self) -> tuple[int, int]:
        """Channels (of queries or keys, of values), each summed over all query heads."""
        return sizes.attention_widths(self.hf)

    def cache_elements(self, tp: int) -> int:
        """Return the number of elements of one token in a rank's KV cache.

        MLA caches its latent and the rotary key on every rank.
        """
        hf = self.hf
        if hf.get("kv_lora_rank"):
            return self.num_layers * (hf["kv_lora_rank"] + hf["qk_rope_head_dim"])
        return self.num_attentions * 2 * math.ceil(sizes.num_kv_heads(hf) / tp) * sizes.head_dim(hf)

    def state_bytes(self, tp: int, itemsize: int) -> int:
        """Return the bytes of a sequence's recurrent states in a rank's caches.

        A state is float32. vLLM keeps two per layer: the current one and the state of the last cached block.
        """
        if not self.num_recurrent:
            return 0
        hf, (heads, keys, values) = self.hf, self.recurrence
        channels = 2 * hf["linear_num_key_heads"] * keys + heads * values
        window = channels * (hf["linear_conv_kernel_dim"] - 1) * itemsize
        return self.num_recurrent * 2 * (4 * heads * keys * values + window) // tp

    @property
    def recurrence(self) -> tuple[int, int, int]:
        """Value heads, channels of a key and channels of a value of its gated delta nets."""
        names = "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
        heads, keys, values = (self.hf[name] for name in names)
        return heads, keys, values

    def score_products(self, length: float) -> float:
        """Return the products per token of attention's scores and sums (half are masked), and of recurrent
        states.

        length: tokens of a sequence. In a chunk of 64 tokens a gated delta net computes scores, solves a
        triangular system, and reads and updates its state.
        """
        products = self.num_attentions * sum(self.heads_width) * length / 2
        if self.num_recurrent:
            heads, keys, values = self.recurrence
            products += self.num_recurrent * heads * (3 * keys * values + 64 * (3 * keys + 2 * values))
        return products

    def derived_elements(self, tp: int) -> int:
        """Return the number of elements that the engine derives from weights and keeps.

        For MLA this is a second form of kv_b_proj; for other models it is 0.
        """
        hf = self.hf
        if not hf.get("kv_lora_rank"):
            return 0
        width = hf["num_attention_heads"] // tp * (hf["qk_nope_head_dim"] + hf["v_head_dim"])
        return self.num_layers * width * hf["kv_lora_rank"]


def check_layouts(config: Config, world_size: int, models: Mapping[str, ModelShape]) -> None:
    """Raise ConfigError if a model or the number of ranks does not fit the layouts of the config."""
    for name, model in models.items():
        if name in DRAFTERS.values():
            continue
        if model.run.on_training_grid:
            check_layout(config, world_size, model.hf, SUPPORTED, path=model.run.own_path or None)
        else:
            check_judge(config, world_size, model.hf)
    check_has_experts(config, [model.hf for model in models.values() if model.run.on_training_grid])


def models_of(config: Config, *, shape: str = "") -> tuple[dict[str, ModelShape], list[str]]:
    """Return every model that a run of this config builds, by name, and notes for the user.

    shape: config.json, or its directory, to use instead of model.path's. Raises ConfigError as
    `rl.engines.inputs` does.
    """
    notes: list[str] = []
    models = {}
    for name, model in run_models(config).items():
        use_shape = model.path == config.model.path and model.on_training_grid
        key = model.key if model.own_path else "model.path"
        hf = _read(model.path, key, shape if use_shape else "", notes)
        hf = hf_config_of(config, model, hf)
        values = bool(model.head)
        body = value_model(hf) if values else hf
        check_architecture(body, model.path, SUPPORTED)
        try:
            if model.on_training_grid:
                check_options(body)
            weights = value_weights(body, needs_head=False) if values else architecture(body).weights(body)
        except KeyError as missing:
            raise ConfigError(f"{model.path}/config.json lacks the key {missing}.") from missing
        learned = [
            weight
            for pair in (adapters_of(config, weights) if model.has_adapters else [])
            for weight in pair.weights
        ]
        if model.shares_base:
            learned += [weight for weight in weights if weight.hf == ("score.weight",)]
        models[name] = ModelShape(
            model,
            body,
            tuple(weights),
            tuple(group_parts(weights)),
            adapters=tuple(learned),
            adapter_parts=tuple(group_parts(learned)),
        )
    policy = models["policy"]
    if has_prediction_head(config):
        lr = config.training.mtp.head_lr
        key = f"training.mtp.head_lr={lr:g}" if lr else config.rollout.draft.setting
        mtp.check(policy.hf, key=key, path=config.model.path)
        optimizer = config.training.optimizer if lr else None
        run = RunModel("mtp", key, "", config.model.path, optimizer=optimizer, on_training_grid=False)
        own = mtp.weights(policy.hf)
        hf = policy.hf | {"num_hidden_layers": 1}
        models["mtp"] = ModelShape(run, hf, tuple(own), tuple(group_parts(own)))
    if (path := config.rollout.draft.path) and needs_engine(config):
        hf = _read(path, "rollout.draft.path", "", notes)
        check_architecture(hf, path, SUPPORTED)
        own = architecture(hf).weights(hf)
        run = RunModel("draft", "rollout.draft.path", path, path, on_training_grid=False)
        models["draft"] = ModelShape(run, hf, tuple(own), tuple(group_parts(own)))
    return models, notes


def drafter_of(config: Config, models: Mapping[str, ModelShape]) -> ModelShape | None:
    """Return what proposes draft tokens to the engine; None without drafts.

    The head for multi-token prediction has one layer and reads the policy's output head too.
    """
    if config.rollout.draft.method != "mtp":
        return models.get("draft")
    return with_output_head(models["mtp"], models["policy"])


def with_output_head(head: ModelShape, policy: ModelShape) -> ModelShape:
    """Return the head for multi-token prediction with the policy's output head among its parts."""
    shared = [p for p in policy.parts if p.weight.tied_to_head or p.weight.hf == ("lm_head.weight",)]
    return replace(head, parts=(*head.parts, *shared))


def _read(path: str, key: str, shape: str, notes: list[str]) -> dict:
    """Return the config.json of a model, else the published one with a name that begins the path's name."""
    if shape:
        file = Path(shape, "config.json") if Path(shape).is_dir() else Path(shape)
        if not file.is_file():
            raise ConfigError(f"--model-shape {shape} is neither a config.json nor a directory with one.")
        return merged(read_object(file))
    if Path(path, "config.json").is_file():
        return read_hf_config(path, key=key)
    named = Path(path).name.lower()
    # SHAPES is missing beside an installed copy of the program.
    fitting = [directory for directory in SHAPES.glob("*/") if named.startswith(directory.name)]
    if not fitting:
        raise ConfigError(
            f"{key}={path} has no config.json here, and its name begins with none of the published shapes "
            f"in {SHAPES}; put its config.json there, or give --model-shape FILE to a dry run or plan."
        )
    directory = max(fitting, key=lambda directory: len(directory.name))
    note = f"{path} is not on this machine; its shape is that of configs/models/{directory.name}"
    if note not in notes:
        notes.append(note)
    found = read_object(directory / "config.json")
    if named.endswith("-text") and "vision_config" in found:  # written by `lockstep model text`
        names = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in found["architectures"]]
        tied = {"tie_word_embeddings": found.get("tie_word_embeddings", False)}
        return tied | found["text_config"] | {"architectures": names}
    return merged(found)
