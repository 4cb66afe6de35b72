"""Checks of a configuration against the number of ranks and the model: layouts, sizes and positions.

All are pure functions, so that every rank raises the same ConfigError: one sentence with the numbers and the
    remedy.
"""

import functools
import json
import math
from collections.abc import Collection, Iterable
from typing import Any

from rl.config.adapter_checks import check_layers
from rl.config.needs import algorithm_of, learns, learns_from_data, needs_engine
from rl.config.options import ConfigError, listed
from rl.config.role_checks import role_ranks
from rl.config.rollout import Rollout
from rl.config.schema import Config, Training
from rl.models import BITWISE, architecture
from rl.models.by_class import MARK, objection
from rl.models.fp8_blocks import cut_blocks, quantised_weights
from rl.models.layout import FP8_BLOCK, Weight, stage_layers
from rl.models.rope import positions
from rl.models.sizes import (
    expert_width,
    has_delta_nets,
    has_expert_biases,
    num_deep_layers,
    num_experts,
    num_kv_heads,
)


def check_architecture(hf: dict[str, Any], path: str, supported: Collection[str]) -> None:
    """Raise ConfigError if there is no code for the model in `path`. `hf` is its config.json."""
    names = hf.get("architectures") or []
    if names and hf.get(MARK):
        return  # `by_class.check` follows
    if not set(names) & set(supported):
        why = objection(hf) or "Its class trains with training.backend=transformers." if names else ""
        raise ConfigError(
            f"The model in {path} has, by its config.json, the architecture {', '.join(names) or '(none)'}; "
            f"Megatron trains {listed(sorted(supported), 'and')}. {why}".rstrip()
        )


def check_layout(
    config: Config,
    world_size: int,
    hf: dict[str, Any],
    supported: Collection[str],
    *,
    path: str | None = None,
) -> None:
    """Raise ConfigError for the first setting that does not fit the ranks of its role or the model.

    `hf` is the config.json of the model in `path` (default: model.path, which generates too), `supported` the
    architectures there is code for. Every rank raises the same error.
    """
    check_architecture(hf, path or config.model.path, supported)
    sees, key = "vision_config" in hf, config.data.image_key
    if sees and path is not None and not (key and path in config.teacher.paths):
        raise ConfigError(
            f"The model in {path} has a vision tower, but only the policy and its teachers read images, with "
            "data.image_key; use a text model."
        )
    if path is None and sees != bool(key):
        way = "leave it out" if key else "set it to a column such as images; rows without images are text"
        tower = "a vision tower" if sees else "no vision tower"
        raise ConfigError(
            f"data.image_key={key or '(empty)'}, but the model in {config.model.path} has {tower}; {way}."
        )
    if config.training.router_replay != "none" and path is None and not num_experts(hf):
        raise ConfigError(
            f"training.router_replay={config.training.router_replay} replays the choice of experts, but the "
            "model has none; leave it out."
        )
    if config.rollout.ep > 1 and path is None and not num_experts(hf):
        raise ConfigError(
            f"rollout.ep={config.rollout.ep} spreads experts over the ranks of a replica, but the model has "
            "none; leave it out."
        )
    if config.model.numerics == "bitwise" and path is None and not set(hf["architectures"]) & set(BITWISE):
        raise ConfigError(
            f"model.numerics=bitwise does not compute the layers of {hf['architectures'][0]}, only those of "
            f"{listed(BITWISE, 'and')}; use model.numerics=fast."
        )
    if has_delta_nets(hf) and path is None:
        check_recurrent(config)
    if path in (None, *config.teacher.paths):
        check_logits(config, hf, path or config.model.path)
    train, rollout = role_ranks(config, world_size)
    if hf.get(MARK):
        check_shard(config, len(train))
    check_training_grid(config, len(train), hf)
    check_minibatch(config, len(train))
    if needs_engine(config) and path is None:
        check_rollout_grid(config, len(rollout), hf)
        check_layers(config, hf)
        check_blocks(config, len(rollout), hf)
        check_positions(
            hf,
            ("data.max_prompt_tokens", config.data.max_prompt_tokens),
            ("rollout.max_response_tokens", config.rollout.max_response_tokens),
        )


def check_shard(config: Config, world_size: int) -> None:
    """Raise ConfigError if `training.shard` does not divide the ranks that train."""
    if config.training.shard and world_size % config.training.shard:
        raise ConfigError(
            f"training.shard={config.training.shard} does not divide the {_ranks(world_size)} that train; "
            f"use {listed(divisors(world_size), 'or')}."
        )


def check_logits(config: Config, hf: dict[str, Any], path: str) -> None:
    """Raise ConfigError if the distributions of policy and teacher are compared, but the model in `path` caps
    its logits."""
    cap = hf.get("final_logit_softcapping")
    if cap and learns(config) and "teacher" in algorithm_of(config).needs:
        raise ConfigError(
            f"algorithm={config.algorithm} compares distributions of plain logits, but the model in {path} "
            f"caps its logits (final_logit_softcapping={cap:g}); use another model, or algorithm=grpo with "
            "teacher.advantage_coef."
        )


def check_recurrent(config: Config) -> None:
    """Raise ConfigError for what an engine with gated delta nets cannot do."""
    if config.rollout.draft.path:
        raise ConfigError(
            f"rollout.draft.path={config.rollout.draft.path} verifies several tokens at once, but the states "
            "of gated delta nets cannot be taken back to the last accepted one; leave out the draft."
        )
    if config.rollout.kv_offload_gib:
        raise ConfigError(
            f"rollout.kv_offload_gib={config.rollout.kv_offload_gib:g} holds keys and values, but not the "
            "states of gated delta nets; leave it out."
        )
    if config.rollout.quantization != "none":
        raise ConfigError(
            f"rollout.quantization={config.rollout.quantization} is not supported for a model with gated "
            "delta nets, whose projections the refit does not quantise; use none."
        )


def check_blocks(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    """Raise ConfigError if a rank would train or generate with a part of a block of an FP8 weight."""
    if config.rollout.quantization == "none":
        return
    if has_expert_biases(hf):
        raise ConfigError(
            "rollout.quantization=fp8 quantises experts, but vLLM has no experts with biases in this format; "
            "use rollout.quantization=none."
        )
    training, rollout = config.training, config.rollout

    def cut(weight: Weight, key: str, size: int) -> str | None:
        size = size if weight.cut.split else 1
        for rank in range(size):
            if key.startswith("rollout"):
                pieces = weight.vllm_pieces(size, rank)
            else:
                pieces = weight.megatron_pieces(size, rank)
            if name := cut_blocks(weight, pieces, in_engine=key.startswith("rollout")):
                return name
        return None

    for weight in _quantised_kinds(json.dumps(hf)):
        is_expert = weight.expert is not None
        training_size = ("training.etp", training.expert_tp) if is_expert else ("training.tp", training.tp)
        rollout_size = ("rollout.tp", 1 if is_expert and rollout.ep > 1 else rollout.tp)
        for key, size in (training_size, rollout_size):
            if name := cut(weight, key, size):
                fits = [n for n in divisors(world_size) if n < size and not cut(weight, key, n)]
                other = f"{key}={listed(fits, 'or')}, or " if fits else ""
                raise ConfigError(
                    f"rollout.quantization=fp8 quantises blocks of {FP8_BLOCK} x {FP8_BLOCK} elements, but "
                    f"with {key}={size} a rank holds a part of one of {name}; "
                    f"use {other}rollout.quantization=none."
                )


@functools.lru_cache(maxsize=4)  # `lockstep plan` checks hundreds of layouts of one model
def _quantised_kinds(text: str) -> list[Weight]:
    """Return the first of the quantised weights that differ only in the numbers of layer and expert.

    These are split identically. text: config.json.
    """
    hf, kinds = json.loads(text), dict[tuple, Weight]()
    for weight in quantised_weights(architecture(hf).weights(hf)):
        kinds.setdefault((weight.megatron, weight.shapes), weight)
    return list(kinds.values())


def check_judge(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    """Check the layout of the judge, which only generates; `hf` is its config.json."""
    judge, (train, _) = config.reward.judge, role_ranks(config, world_size)
    try:
        check_rollout_grid(config, len(train), hf)
        check_positions(
            hf,
            ("reward.judge.max_prompt_tokens", judge.max_prompt_tokens),
            ("reward.judge.max_response_tokens", judge.max_response_tokens),
        )
    except ConfigError as error:
        raise ConfigError(f"reward.judge.path={judge.path}: {error}") from error


def check_positions(hf: dict[str, Any], prompt: tuple[str, int], response: tuple[str, int]) -> None:
    """Raise ConfigError if the longest prompt and response, each a key and its value, exceed the model's
    positions."""
    model_size(hf, "max_position_embeddings")
    limit, total = positions(hf), prompt[1] + response[1]
    if total > limit:
        raise ConfigError(
            f"{prompt[0]}={prompt[1]} and {response[0]}={response[1]} add up to {total} tokens, "
            f"but the model has {limit} positions (max_position_embeddings); lower them to {limit} "
            "together, or scale its rotary embedding (docs/models.md, Long contexts)."
        )


def check_training_grid(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    tp, pp, cp = config.training.tp, config.training.pp, config.training.cp
    if world_size % (tp * pp):
        raise ConfigError(
            f"training.tp={tp} times training.pp={pp} is {tp * pp}, which does not divide the world of "
            f"{_ranks(world_size)}; {_products('training.tp=1 training.pp=1', world_size, tp * pp)}."
        )
    if world_size % (tp * pp * cp):
        raise ConfigError(
            f"training.cp={cp} does not divide the {world_size // (tp * pp)} ranks that training.tp={tp} and "
            f"training.pp={pp} leave of {world_size}; use {listed(divisors(world_size // (tp * pp)), 'or')}."
        )
    sizes = split_sizes(hf) | {"{} key/value heads": num_kv_heads(hf)}
    fits = [n for n in divisors(world_size // pp) if all(size % n == 0 for size in sizes.values())]
    check_divides("training.tp", tp, sizes, fits)
    layers = model_size(hf, "num_hidden_layers")
    if pp > layers:
        fits = [n for n in divisors(world_size // tp) if n <= layers]
        raise ConfigError(
            f"training.pp={pp} leaves stages without a layer, the model has {layers}; use "
            f"{listed(fits, 'or')}."
        )
    if pp > 1 and stage_layers(layers, pp)[0] < (deep := num_deep_layers(hf)):
        fits = [n for n in divisors(world_size // tp) if n <= layers and stage_layers(layers, n)[0] >= deep]
        raise ConfigError(
            f"training.pp={pp} gives the first stage {stage_layers(layers, pp)[0]} layers, but it must have "
            f"the {deep} that receive inner outputs of the vision tower; use {listed(fits, 'or')}."
        )
    check_chunks(config.training, layers)
    modules = config.training.recompute_modules if config.training.recompute == "selective" else []
    if "mla_up_proj" in modules and not hf.get("kv_lora_rank"):
        raise ConfigError(
            "training.recompute_modules=mla_up_proj names projections from latents, but the model has none "
            "(kv_lora_rank); leave it out."
        )
    check_expert_grid(config, world_size, hf)


def check_chunks(training: Training, layers: int) -> None:
    """Raise ConfigError if the layers of a pipeline stage cannot be divided into `training.vpp` chunks."""
    pp, vpp = training.pp, training.vpp
    if vpp > 1 and pp == 1:
        raise ConfigError(
            f"training.vpp={vpp} divides pipeline stages, but training.pp=1 has none; leave it out, or set "
            "training.pp to 2 or more."
        )
    if pp * vpp > layers:
        raise ConfigError(
            f"training.vpp={vpp} with training.pp={pp} makes {pp * vpp} chunks, but the model has {layers} "
            f"layers; use training.vpp={layers // pp} or less."
        )


def check_expert_grid(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    """Raise ConfigError if the experts do not fit their grid. A model without experts has none."""
    training, experts = config.training, num_experts(hf)
    tp, pp, ep, etp = training.tp, training.pp, training.ep, training.expert_tp
    if not experts:
        return
    check_divides(
        "training.ep",
        ep,
        {"{} experts": experts},
        [n for n in divisors(world_size // pp) if experts % n == 0],
    )
    check_divides(
        "training.etp",
        etp,
        {"experts' intermediate size of {}": expert_width(hf)},
        divisors(expert_width(hf)),
    )
    if world_size % (etp * ep * pp):
        raise ConfigError(
            f"The experts' grid of training.ep={ep} x etp={etp} x training.pp={pp} is {etp * ep * pp}, which "
            f"does not divide the world of {_ranks(world_size)}; "
            f"{_products('training.ep=1 training.tp=1 training.pp=1', world_size, etp * ep * pp)}."
        )
    if etp > 1 and has_expert_biases(hf):
        raise ConfigError(
            f"training.etp={etp} (training.tp={tp}, training.ep={ep}) splits experts, whose biases Megatron "
            "then adds once per rank; use training.tp=1, or training.ep above 1 with training.etp=1."
        )
    # megatron-core 0.16.1 then adds up the experts' gradients over data parallel ranks only, not over tensor
    # parallel ones.
    if ep == 1 and etp != tp:
        raise ConfigError(
            f"training.etp={etp} differs from training.tp={tp}, which works only with training.ep above 1; "
            "leave it out."
        )
    # Routers choose for whole tokens, which lie on one tensor parallel rank under sequence parallelism only.
    if tp > 1 and not training.sequence_parallel:
        raise ConfigError(
            f"training.sequence_parallel=false with training.tp={tp} cannot train a mixture of experts; set "
            "it to true."
        )


def check_has_experts(config: Config, models: Iterable[dict[str, Any]]) -> None:
    """Raise ConfigError for sizes of the experts' grid if no model on the training grid has experts.

    models: the config.json of each.
    """
    training = config.training
    if (training.ep > 1 or training.etp) and not any(map(num_experts, models)):
        raise ConfigError(
            f"training.ep={training.ep} and training.etp={training.etp} split experts, but no model that the "
            "run trains or computes with has any; leave them out."
        )


def check_rollout_grid(config: Config, world_size: int, hf: dict[str, Any]) -> None:
    tp, sizes, kv_heads = config.rollout.tp, split_sizes(hf), num_kv_heads(hf)
    experts = num_experts(hf)
    if experts and config.rollout.ep == 1:
        sizes |= {"experts' intermediate size of {}": expert_width(hf)}
    if world_size % tp:
        raise ConfigError(
            f"rollout.tp={tp} does not divide the world of {_ranks(world_size)}; use "
            f"{listed(divisors(world_size), 'or')}, or start a multiple of {tp} ranks."
        )
    # vLLM replicates key/value heads when there are fewer of them than ranks; Megatron does not.
    fits = [n for n in divisors(world_size) if all(size % n == 0 for size in sizes.values())]
    replicates = not has_expert_biases(hf)  # vLLM's model of gpt-oss divides by 0 heads instead
    fits = [n for n in fits if kv_heads % n == 0 or (replicates and n % kv_heads == 0)]
    # vLLM pads the vocabulary to a multiple of 64 and then splits it evenly.
    padded = math.ceil(model_size(hf, "vocab_size") / 64) * 64
    sizes |= {"vocabulary, padded to {}": padded}
    fits = [n for n in fits if padded % n == 0]
    check_divides("rollout.tp", tp, sizes, fits)
    if kv_heads % tp and not replicates:
        raise ConfigError(
            f"rollout.tp={tp} does not divide the model's {kv_heads} key/value heads, which vLLM does not "
            f"replicate for gpt-oss; use {listed(fits, 'or')}."
        )
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            f"rollout.tp={tp} is neither a divisor nor a multiple of the model's {kv_heads} key/value heads; "
            f"use {listed(fits, 'or')}."
        )
    if config.rollout.dp_attention and config.teacher.teacher_share:
        raise ConfigError(
            f"rollout.dp_attention=true cannot be combined with teacher.teacher_share="
            f"{config.teacher.teacher_share}, because a second engine would have other groups of ranks; use "
            "rollout.ep=1."
        )
    if experts and config.rollout.ep > 1:
        check_expert_ranks(config.rollout, world_size, experts, fits)


def check_expert_ranks(rollout: Rollout, world_size: int, experts: int, fits: list[int]) -> None:
    """Raise ConfigError if the engine's ranks cannot hold whole experts, each the same number.

    experts: of a layer. fits: valid values of rollout.tp.
    """
    fits = [n for n in (divisors(world_size) if rollout.dp_attention else fits) if experts % n == 0]
    if world_size % rollout.ep:
        raise ConfigError(
            f"rollout.ep={rollout.ep} does not divide the world of {_ranks(world_size)}; use "
            f"{listed(fits, 'or')}, or start a multiple of {rollout.ep} ranks."
        )
    check_divides("rollout.ep", rollout.ep, {"{} experts": experts}, fits)
    if rollout.dp_attention:
        check_divides("rollout.tp", rollout.tp, {"rollout.ep={}": rollout.ep}, divisors(rollout.ep))
    elif rollout.ep != rollout.tp:
        raise ConfigError(
            f"rollout.ep={rollout.ep} must be 1 or rollout.tp={rollout.tp}, the ranks of a replica, without "
            f"rollout.dp_attention; use {listed([f'rollout.tp={n} rollout.ep={n}' for n in fits], 'or')}."
        )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _products(smallest: str, world_size: int, product: int) -> str:
    """Return the remedy if the product of sizes does not divide the world. smallest: the sizes for 1 rank."""
    fits = f"use a product of {listed(divisors(world_size), 'or')}" if world_size > 1 else f"set {smallest}"
    return f"{fits}, or start {product} ranks or a multiple of them"


def check_minibatch(config: Config, world_size: int) -> None:
    """Raise ConfigError if a mini-batch has fewer samples than there are data parallel ranks."""
    training, step = config.training, config.data.prompts_per_step
    dp = world_size // (training.tp * training.cp * training.pp)
    needs = algorithm_of(config).needs
    # A mini-batch may consist of prompts to which the data respond, once each.
    samples = 1 if learns_from_data(config) or "samples" not in needs else config.rollout.samples_per_prompt
    prompts = config.training.prompts_per_minibatch or step
    if prompts * samples >= dp:
        return
    needed = math.ceil(dp / samples)
    if needed <= step:
        advice = f"set training.prompts_per_minibatch to {min(n for n in divisors(step) if n >= needed)}"
    elif config.training.prompts_per_minibatch:
        advice = f"raise data.prompts_per_step and training.prompts_per_minibatch to at least {needed}"
    else:
        advice = f"raise data.prompts_per_step to at least {needed}"
    raise ConfigError(
        f"A mini-batch of {prompts} prompts x {samples} samples is too small for the data parallel size of "
        f"{dp} ({world_size} ranks / (tp={training.tp} x cp={training.cp} x pp={training.pp})); {advice}."
    )


def check_divides(key: str, value: int, sizes: dict[str, int], fits: list[int]) -> None:
    """Raise ConfigError if `value` does not divide one of the model's `sizes` (words with a {} -> size);
    `fits` are valid values."""
    for words, size in sizes.items():
        if size % value:
            raise ConfigError(
                f"{key}={value} does not divide the model's {words.format(size)}; use {listed(fits, 'or')}."
            )


def split_sizes(hf: dict[str, Any]) -> dict[str, int]:
    """Return the sizes that tensor parallelism splits evenly, in training and in generation."""
    sizes = {
        "{} attention heads": model_size(hf, "num_attention_heads"),
        "hidden size of {}": model_size(hf, "hidden_size"),
    }
    if "intermediate_size" in hf or not num_experts(hf):  # else no layer is dense
        sizes["intermediate size of {}"] = model_size(hf, "intermediate_size")
    if has_delta_nets(hf):
        sizes["{} key heads of gated delta nets"] = model_size(hf, "linear_num_key_heads")
    return sizes


def model_size(hf: dict[str, Any], name: str) -> int:
    if not isinstance(hf.get(name), int):
        raise ConfigError(
            f"The model's config.json has no number '{name}'; is model.path a Hugging Face checkpoint?"
        )
    return hf[name]


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
