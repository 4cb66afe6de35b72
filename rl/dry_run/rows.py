"""How long the sequences and the rows of a run are, and how many micro-batches they make."""

import math
from dataclasses import replace

from rl.config.needs import algorithm_of
from rl.config.schema import Config
from rl.dry_run.grids import Layout
from rl.dry_run.hardware import Hardware
from rl.dry_run.shape import ModelShape
from rl.models.sizes import cpu_row_tokens


def with_actual_rows(config: Config, policy: ModelShape, hardware: Hardware) -> Config:
    """Return the config with the tokens of a CPU's micro-batch (`rl.training.micro_batch_plans`)."""
    training = config.training
    if not hardware.is_cpu:
        return config
    preferred = max(cpu_row_tokens(policy.hf), math.ceil(longest_group(config) / training.cp))
    tokens = min(training.micro_batch_tokens, preferred)
    return replace(config, training=replace(training, micro_batch_tokens=tokens))


def longest_group(config: Config) -> int:
    """Return the maximum tokens of the samples that share a prompt in a micro-batch."""
    samples = config.rollout.samples_per_prompt
    if config.training.shared_prefix and sequences_per_prompt(config) == samples:
        return config.data.max_prompt_tokens + samples * config.rollout.max_response_tokens
    return longest_sequence(config)


def response_share(config: Config) -> float:
    """Return the share of a row's tokens that are sampled, if all sequences have the maximum length."""
    if "samples" not in algorithm_of(config).needs:
        return 1.0
    prompt, group = config.data.max_prompt_tokens, longest_group(config)
    return (group - prompt) / group


def longest_row(config: Config, layout: Layout) -> int:
    """Return the maximum tokens of a micro-batch; a longer sequence forms a micro-batch alone."""
    prompts = config.training.prompts_per_minibatch or config.data.prompts_per_step
    tokens, group = longest_sequence(config), longest_group(config)
    whole = prompts * (group if group > tokens else sequences_per_prompt(config) * tokens)
    return max(min(config.training.row_tokens, math.ceil(whole / layout.dp)), tokens)


def longest_sequence(config: Config) -> int:
    """Return the maximum tokens of a sequence."""
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def num_micro_batches(config: Config, layout: Layout, tokens_per_sequence: float) -> int:
    """Return the number of micro-batches of one mini-batch on one data parallel rank."""
    prompts = config.training.prompts_per_minibatch or config.data.prompts_per_step
    tokens = prompts * sequences_per_prompt(config) * tokens_per_sequence / layout.dp
    number = max(1, math.ceil(tokens / config.training.row_tokens))
    return math.ceil(number / layout.pp) * layout.pp if layout.vpp > 1 else number


def micro_batches_in_flight(layout: Layout, stage: int, number: int) -> float:
    """Return how many micro-batches of `number` have their activations kept by a stage at once.

    1F1B keeps one for each stage from this one to the last. For example, with pp=4 stage 0 keeps 4 and stage
    3 keeps 1. A chunk keeps 1/vpp; with chunks, a stage passes (vpp - 1) pp chunks forward before, and two
    for each following stage (Megatron's interleaving).
    """
    if layout.vpp == 1:
        return min(layout.pp - stage, number)
    chunks = (layout.vpp - 1) * layout.pp + 2 * (layout.pp - stage - 1) + 1
    return min(chunks / layout.vpp, number)


def sequences_per_prompt(config: Config) -> int:
    """Return the number of sequences trained per prompt: its samples and the data's own responses."""
    count = {"responses": 1, "labels": 1, "pairs": 2, "samples": config.rollout.samples_per_prompt}
    return sum(count.get(need, 0) for need in algorithm_of(config).needs)
