"""Verdicts on the first step of a run (`run.mode=check`): pure functions of the step's results.

Each function returns a Verdict, or None if it does not apply. ok: as it should be. look: possible, but decide
whether it is intended. wrong: the run would not learn what it should. For example, `truncated` says look if
10 % of the responses are truncated, and wrong if 50 % are. docs/first_step.md explains every line.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl.checks.rounding import WARNED, RoundingNoise
from rl.config.durations import seconds_of
from rl.config.needs import algorithm_of, learns_from_samples, uses_teacher
from rl.config.schema import Config
from rl.data.batch import Batch, segment_counts
from rl.data.special_tokens import decode, first_special, special_ids
from rl.run_directory.view import duration
from rl.training.learning_rate import learning_rate

LARGE_NORM = 100.0
"""Upper limit of the gradient norm in usual first steps of a language model."""
TRUNCATED = (0.1, 0.5)
"""Shares of truncated responses from which the verdict is look, and from which it is wrong."""
FLAT_GROUPS = 0.7
"""Share of groups with one score for all samples, from which the verdict is look."""
FAILED = 0.2
"""Share of samples with a failed reward, from which the verdict is wrong."""
EQUAL_SAMPLES = 0.2
"""Share of samples equal to another sample of their group, from which the verdict is look."""
PROBS_GAP = 0.01
"""Mean |p of the trainer - p of the engine| from which the verdict is look."""
MOVED = (0.1, 0.5)
"""Mean change of a sampled token's log-prob by one step, in nats, from which the verdict is look, and from
which it is wrong. For comparison, PPO clips a change of 0.2."""
IDLE = 0.2
"""Share of a phase that ranks may wait for the slowest rank, from which the verdict is look."""


@dataclass(frozen=True)
class Verdict:
    name: str
    level: Literal["ok", "look", "wrong"]
    text: str
    remedy: str = ""


@dataclass
class Facts:
    """Batch, metrics and times of the first step. All except the times are identical on every rank."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    stop_ids: Collection[int]
    metrics: Mapping[str, float]
    batch: Batch | None = None
    """The batch with the columns that `learn` filled; None if the step ended earlier."""
    after: Tensor | None = None
    """Log-probs of the batch's tokens under the policy after the step, float32 [T]."""
    noise: RoundingNoise | None = None
    """The rounding noise of the model; None if it is not measured."""
    error: str = ""
    """The error that ended the step."""
    dp: int = 1
    row_tokens: int = 16384
    """Maximum number of tokens of a micro-batch (`MinibatchPlanner.row_tokens`)."""
    shares_prompts: bool = False
    """Whether a micro-batch computes a prompt once for all of its samples."""
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds, host GiB and device GiB by phase; memory is the maximum over the ranks."""
    step: int = 1

    @cached_property
    def samples(self) -> Batch | None:
        """The batch with one sample per trajectory; None without samples."""
        return self.batch.merge_rows() if self.batch is not None and len(self.batch) else None

    @property
    def sampled(self) -> Batch | None:
        """`samples`, if the policy generated them."""
        is_sampled = self.batch is not None and self.batch.rollout_logprobs is not None
        return self.samples if is_sampled else None


def verdicts(facts: Facts) -> list[Verdict]:
    """Return the verdicts in the order of a step."""
    found = [check(facts) for check in CHECKS]
    return [verdict for verdict in found if verdict is not None]


def graded(name: str, value: float, levels: tuple[float, float], text: str, remedy: str) -> Verdict:
    """Return the verdict look from the first level on, wrong from the second level on, else ok without the
    remedy."""
    if not value >= levels[0] and not math.isnan(value):
        return Verdict(name, "ok", text)
    return Verdict(name, "look" if value < levels[1] else "wrong", text, remedy)


# Text -----------------------------------------------------------------------------------------------------


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the chat template ends an assistant's turn, None if unknown."""
    answer = "answer"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    if tokenizer.chat_template is None:
        return None
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template may raise anything, and may need other messages
        return None
    assert isinstance(text, str)
    ids = tokenizer(text.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    special = special_ids(tokenizer)
    return next((id for id in ids if id in special), None)


def chat_template(facts: Facts) -> Verdict | None:
    samples, tokenizer = facts.samples, facts.tokenizer
    if samples is None or not samples.prompts:
        return None
    if samples.prompts[0].messages is None:
        if tokenizer.chat_template is None:
            return Verdict("chat template", "ok", "prompts are text, and the model has no chat template")
        if token := first_special(samples.prompts[0].text, tokenizer):
            return Verdict("chat template", "ok", f"prompts are text that begins with {token}")
        return Verdict(
            "chat template",
            "look",
            "prompts are strings, so the model's chat template is not applied",
            "if this is an instruct model, set data.string_prompts=user",
        )
    end = turn_end(tokenizer)
    name = "" if end is None else tokenizer.convert_ids_to_tokens(end)
    if end is not None and end not in facts.stop_ids and facts.sampled is not None:
        return Verdict(
            "chat template",
            "wrong",
            f"it ends a turn with {name} (id {end}), at which generation does not stop",
            f"set rollout.stop_token_ids=[{end}], or correct generation_config.json of the model",
        )
    return Verdict("chat template", "ok", f"prompts are messages; a turn ends with {name or 'text'}")


def end_token(facts: Facts) -> Verdict | None:
    samples = facts.sampled
    if samples is None or samples.turns is not None:
        return None
    ended = float((~samples.truncated).float().mean())
    names = ", ".join(facts.tokenizer.convert_ids_to_tokens(sorted(facts.stop_ids)))
    text = f"{ended:.1%} of {len(samples)} responses end by themselves (at {names})"
    if ended:
        return Verdict("end token", "ok", text)
    return Verdict(
        "end token",
        "wrong",
        text,
        "the model does not know these tokens, or has no room: compare the chat template with the one it was "
        "trained with, rollout.stop_token_ids, and rollout.max_response_tokens",
    )


def special_tokens(facts: Facts) -> Verdict | None:
    """Judge special tokens within responses, for example of a wrong template or a missing stop token."""
    samples = facts.sampled
    if samples is None or samples.turns is not None:
        return None
    special = torch.tensor(sorted(special_ids(facts.tokenizer) - set(facts.stop_ids)))
    found = [torch.isin(torch.from_numpy(ids).long(), special) for ids in samples.response_ids]
    share = sum(bool(each.any()) for each in found) / len(found)
    text = f"{share:.1%} of the responses contain special tokens at which they do not end"
    if share:
        counts = torch.cat(
            [torch.from_numpy(ids).long()[each] for ids, each in zip(samples.response_ids, found)]
        )
        most = int(counts.mode().values)
        text += f", most often {facts.tokenizer.convert_ids_to_tokens(most)} (id {most})"
    remedy = "if such a token ends a turn, add it to rollout.stop_token_ids"
    # Never wrong, because <think> and other marks of reasoning may be special tokens.
    return graded("special tokens", share, (0.02, math.inf), text, remedy)


def truncated(facts: Facts) -> Verdict | None:
    samples = facts.sampled
    if samples is None:
        return None
    share, limit = float(samples.truncated.float().mean()), facts.config.rollout.max_response_tokens
    lengths = samples.sampled_lengths.double()
    text = f"{share:.1%} of the responses; length mean {lengths.mean():.0f}, limit {limit} tokens"
    remedy = (
        f"raise rollout.max_response_tokens={limit}: a truncated response is scored without its end, so the "
        "policy learns to be short instead of right"
    )
    return graded("truncated", share, TRUNCATED, text, remedy)


def masks(facts: Facts) -> Verdict | None:
    samples = facts.samples
    if samples is None:
        return None
    learned = samples.column("mask") > 0
    share = float(learned.float().mean()) if len(learned) else 0.0
    empty = float((segment_counts(learned, samples.lengths) == 0).float().mean())
    text = f"{share:.1%} of the response tokens are learned from; {empty:.1%} of the samples have none"
    remedy = (
        "see the samples above: the mask is 0 on tokens that the policy did not sample or that were rejected"
    )
    return graded("masks", max(empty, float(share == 0)), (0.02, 0.5), text, remedy)


def duplicates(facts: Facts) -> Verdict | None:
    samples = facts.sampled
    if samples is None or facts.config.rollout.samples_per_prompt == 1:
        return None
    keys = [(int(g), ids.tobytes()) for g, ids in zip(samples.groups, samples.response_ids, strict=True)]
    share = 1 - len(set(keys)) / len(keys)
    remedy = (
        "samples of a group that are equal teach nothing; raise rollout.temperature, or use harder prompts"
    )
    text = f"{share:.1%} of the samples equal another one of their group"
    return graded("duplicates", share, (EQUAL_SAMPLES, math.inf), text, remedy)


# Reward ---------------------------------------------------------------------------------------------------


def reward_failures(facts: Facts) -> Verdict | None:
    if "reward/failures" not in facts.metrics:
        return None
    failures, total = facts.metrics["reward/failures"], len(facts.samples) if facts.samples is not None else 1
    text = f"{failures:.0f} of {total} calls failed"
    remedy = "the log has the first failure; correct the function, or raise reward.timeout_s or memory_mib"
    return graded("reward failures", failures / total, (1e-9, FAILED), text, remedy)


def reward_spread(facts: Facts) -> Verdict | None:
    metrics = facts.metrics
    if "critic/score/max" not in metrics:
        return None
    least, most, mean = (metrics[f"critic/score/{name}"] for name in ("min", "max", "mean"))
    is_taught = uses_teacher(facts.config)
    if least == most:
        return Verdict(
            "reward",
            "look" if is_taught else "wrong",
            f"every sample has the score {mean:g}, so nothing can be learned"
            + (" but from the teacher" if is_taught else ""),
            "try the function on stored samples (run.mode=score_only); if it is right, the prompts are too "
            "hard or too easy for this model",
        )
    text = f"mean {mean:.3g}, from {least:.3g} to {most:.3g}"
    samples = facts.sampled
    if samples is None or facts.config.rollout.samples_per_prompt == 1 or samples.scores is None:
        return Verdict("reward", "ok", text)
    own = [samples.scores[samples.groups == group] for group in samples.groups.unique()]
    flat = sum(bool((scores == scores[0]).all()) for scores in own) / len(own)
    text += f"; {flat:.1%} of {len(own)} groups have one score for all samples"
    remedy = (
        "such groups have no advantage; use prompts that the model solves sometimes, more "
        "rollout.samples_per_prompt, or algorithm=dapo, which replaces them"
    )
    estimator, _ = facts.config.objective.chosen
    needs = algorithm_of(facts.config).needs if estimator is None else estimator.needs
    if "groups" not in needs:
        return Verdict("reward", "ok", text)
    return graded("reward", flat, (FLAT_GROUPS, math.inf if is_taught else 1.0), text, remedy)


# Probabilities and the update -----------------------------------------------------------------------------


def engine_gap(facts: Facts) -> Verdict | None:
    batch, metrics = facts.batch, facts.metrics
    if facts.sampled is None or batch is None or batch.old_logprobs is None:
        return None
    generated, learned = batch.column("rollout_logprobs"), batch.column("mask") > 0
    gaps = torch.where(learned, (batch.old_logprobs - generated).abs(), 0.0)
    counted = gaps[learned]
    if not len(counted):
        return None
    worst = int(gaps.argmax())
    sample = int((batch.offsets[1:] <= worst).sum())
    place = worst - int(batch.offsets[sample])
    token = decode([int(batch.response_ids[sample][place])], facts.tokenizer)
    p, q = (float(column[worst].exp()) for column in (batch.old_logprobs, generated))
    quantiles = counted.double().sort().values
    middle, high = (float(quantiles[int(share * (len(counted) - 1))]) for share in (0.5, 0.99))
    text = (
        f"|difference| of log-probs: median {middle:.2g}, 99 % below {high:.2g}, largest "
        f"{float(gaps.max()):.2g} (token {place} of sample {sample}, {token!r}: p {p:.3g} in the trainer, "
        f"{q:.3g} in the engine)"
    )
    if limit := metrics.get("training/logprob_gap_limit"):
        text += f"; mean {metrics['training/logprob_gap']:.2g}, rounding explains {limit:.2g}"
    remedy = (
        "the two models compute differently; compare dtypes and quantisation, or correct it with "
        "rollout_correction.truncate_tokens"
    )
    if facts.noise is not None and metrics.get("training/logprob_gap", 0.0) > facts.noise.limit(WARNED):
        return Verdict("engine and trainer", "wrong", f"{text}; {WARNED:g} times the model's noise", remedy)
    gap = metrics.get("training/rollout_probs_diff_mean", 0.0)
    return graded("engine and trainer", gap, (PROBS_GAP, math.inf), text, remedy)


def reference(facts: Facts) -> Verdict | None:
    batch = facts.batch
    if batch is None or batch.ref_logprobs is None or batch.old_logprobs is None:
        return None
    gap = torch.where(batch.column("mask") > 0, (batch.old_logprobs - batch.ref_logprobs).abs(), 0.0)
    text = (
        f"largest |difference| of log-probs from the reference {float(gap.max()):.2g}: KL is 0 at the start"
    )
    if facts.step > 1 or facts.config.rollout_correction.bypass:
        return None
    return Verdict("reference", "ok", text)  # otherwise LogprobMismatch has ended the step


def ratio(facts: Facts) -> Verdict | None:
    metrics = facts.metrics
    if "actor/pg_clipfrac" not in metrics:
        return None
    # With bypass the ratio compares trainer and engine, and is not exactly 1.
    first = "" if facts.config.rollout_correction.bypass else "the first update began at ratio 1; "
    text = (
        f"{first}over all updates KL {metrics.get('actor/ppo_kl', 0.0):.2g}, "
        f"{metrics['actor/pg_clipfrac']:.1%} of the tokens clipped"
    )
    remedy = "lower training.optimizer.lr, training.epochs or the number of mini-batches"
    return graded("ratio", metrics["actor/pg_clipfrac"], (0.3, 0.8), text, remedy)


def gradient_norm(facts: Facts) -> Verdict | None:
    norm = facts.metrics.get("actor/grad_norm")
    if norm is None:
        return None
    clip = facts.config.training.optimizer.clip_grad
    text = f"{norm:.3g}, clipped at {clip:g}" if clip else f"{norm:.3g}, not clipped"
    if norm == 0:
        return Verdict(
            "gradient norm", "wrong", text, "no sample has an advantage; see the line of the reward"
        )
    remedy = "usual are 0.01 to 10; look at the loss's scale (objective.aggregation) and at the advantages"
    # With given responses the loss sums log-ratios over a response, and a new model's likelihood is steep.
    usual = 10 if learns_from_samples(facts.config) else 100
    return graded("gradient norm", norm, (usual * clip or LARGE_NORM, math.inf), text, remedy)


def movement(facts: Facts) -> Verdict | None:
    batch, config = facts.batch, facts.config
    if batch is None or facts.after is None:
        return None
    adam, warmup = config.training.optimizer, config.critic.warmup_steps
    lr = learning_rate(adam, facts.step - warmup, config.run.max_steps - warmup)
    change = (facts.after - batch.column("old_logprobs")).abs()[batch.column("mask") > 0].double()
    moved = float(change.mean()) if len(change) else 0.0
    text = f"log-probs of the samples changed by {moved:.2g} nats on average, at lr {lr:.2g}"
    levels = MOVED
    if lr < adam.lr:  # the change is about proportional to lr; Adam's first step is larger than later steps
        if moved < MOVED[1]:
            levels = MOVED[0], math.inf
        moved *= adam.lr / lr
        text += f"; about {moved:.2g} at the peak, {adam.lr:.2g}"
    if moved == 0 and facts.metrics.get("actor/grad_norm"):
        return Verdict(
            "size of the step", "look", text, "raise training.optimizer.lr, or use model.dtype=float32"
        )
    remedy = f"lower training.optimizer.lr, now {adam.lr:g}; a usual step changes log-probs by 0.001 to 0.05"
    return graded("size of the step", moved, levels, text, remedy)


def error(facts: Facts) -> Verdict | None:
    if not facts.error:
        return None
    return Verdict("step", "wrong", f"it ended with an error: {facts.error}", "see docs/checks.md")


# Speed ----------------------------------------------------------------------------------------------------

SLOW = {
    "gen": "rollout.max_concurrent_samples, rollout.tp, rollout.carry_over, or the section roles",
    "update_actor": "training.micro_batch_tokens, training.recompute=none, the training grid",
    "reward": "reward.workers, and the reward function itself",
    "update_weights": "the layouts of trainer and engine; the first refit also compares all weights",
}
"""Phase -> what makes it faster."""


def slowest_phase(facts: Facts) -> Verdict | None:
    total = facts.metrics.get("timing_s/step")
    if not total or not facts.phases or facts.sampled is None:  # otherwise the update is the whole step
        return None
    name, values = max(facts.phases.items(), key=lambda item: item[1]["s"])
    share = values["s"] / total
    text = f"{name} takes {values['s']:.3g} of {total:.3g} s ({share:.0%})"
    limit = 0.75 if name in ("gen", "update_actor") else 0.4
    remedy = f"see {SLOW.get(name, 'docs/performance.md')}"
    return graded("slowest phase", share, (limit, math.inf), text, remedy)


def idle_replicas(facts: Facts) -> Verdict | None:
    idle = facts.metrics.get("perf/idle_share_gen/mean")
    if idle is None:
        return None
    text = f"replicas wait {idle:.1%} of the generation for the slowest one"
    remedy = "set rollout.longest_first=true, rollout.deterministic=false or rollout.carry_over=true"
    return graded("idle replicas", idle, (IDLE, math.inf), text, remedy)


def micro_batches(facts: Facts) -> Verdict | None:
    batch, number = facts.batch, facts.metrics.get("training/micro_batches")
    if batch is None or not number or not len(batch):
        return None
    limit = facts.row_tokens
    prompts = {(group, ids.tobytes()) for group, ids in zip(batch.groups.tolist(), batch.prompt_ids)}
    once = sum(len(ids) for _, ids in prompts) // batch.prompt_ids[0].itemsize
    tokens = int(batch.lengths.sum()) + (once if facts.shares_prompts else int(batch.prompt_lengths.sum()))
    fill, imbalance = tokens / (number * facts.dp * limit), facts.metrics["training/imbalance"]
    text = (
        f"{number:.0f} per rank of up to {limit} tokens, {fill:.0%} full (packed, without padding); the "
        f"busiest rank has {imbalance:.0%} more work than the mean"
    )
    remedy = "larger mini-batches (training.prompts_per_minibatch) balance better"
    return graded("micro-batches", imbalance, (IDLE, math.inf), text, remedy)


def memory(facts: Facts) -> Verdict | None:
    if not facts.phases:
        return None
    host = max(values["host GiB"] for values in facts.phases.values())
    text = f"host {host:.1f} GiB on the rank with the most"
    if "device GiB" not in next(iter(facts.phases.values())):
        return Verdict("memory", "ok", text)
    name, values = max(facts.phases.items(), key=lambda item: item[1]["device GiB"])
    share = values["device GiB"] / values["device total GiB"]
    text += f"; GPU {values['device GiB']:.1f} of {values['device total GiB']:.1f} GiB in {name}"
    remedy = (
        "longer samples will need more; lower training.micro_batch_tokens, or set training.recompute=full"
    )
    return graded("memory", share, (0.95, math.inf), text, remedy)


def whole_run(facts: Facts) -> Verdict | None:
    seconds, run = facts.metrics.get("timing_s/step"), facts.config.run
    if not seconds:
        return None
    total = seconds * run.max_steps
    text = (
        f"{run.max_steps} steps x {seconds:.3g} s = {duration(total)}, without validation; later steps are "
        "faster than the first"
    )
    longest = seconds_of(run.max_time) if run.max_time else math.inf
    remedy = f"run.max_time={run.max_time} ends it before; the same command then continues it"
    return graded("whole run", total, (longest, math.inf), text, remedy)


CHECKS: tuple[Callable[[Facts], Verdict | None], ...] = (
    error,
    chat_template,
    end_token,
    special_tokens,
    truncated,
    masks,
    duplicates,
    reward_failures,
    reward_spread,
    engine_gap,
    reference,
    ratio,
    gradient_norm,
    movement,
    slowest_phase,
    idle_replicas,
    micro_batches,
    memory,
    whole_run,
)
"""The verdicts in the order of the report."""
