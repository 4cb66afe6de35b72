"""On-policy distillation: GKD (Agarwal et al., arXiv:2306.13649), and a policy that teaches itself.

The policy p learns the distribution q of a teacher at every token of a response y. With GKD the policy
samples y itself, so it learns how to continue its own prefixes:

    L = E_{y ~ lambda p + ...} [ mean_t D(p(. | x, y_<t), q(. | x, y_<t)) ]

The gradient is taken of D at the given tokens; it does not pass through the sampling of y, as in the paper.
`teacher.student_share` is lambda; the teacher (`teacher.teacher_share`) and the data respond to the other
prompts of a step. The paper draws one of these sources for each step. Here every step and mini-batch has
responses of all sources in these shares, which gives the same expectation.

`teacher.divergence` is D: the reverse or the forward KL divergence or Jensen-Shannon's. It is over the whole
vocabulary, or over the teacher's `teacher.top_k` tokens and one outcome for all others. Both distributions
are at `rollout.temperature`. Each `data_source` may have a teacher of its own (`teacher.sources`; MOPD,
arXiv:2601.02780). No reward is needed.

With `teacher.self_taught` the teacher is the policy itself; its prompt also contains the reference answer
(SDFT, arXiv:2601.19897) or the reward function's feedback on the response (SDPO, arXiv:2601.20802).

One sample per prompt is enough, because there is no baseline.

Left out: GKD's sum of a reward and a divergence. Instead, `teacher.advantage_coef` adds a teacher to an
algorithm with a reward.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rl.config.needs import needs_feedback
from rl.config.schema import Config
from rl.data.batch import Batch, concatenate
from rl.objectives.aggregate import aggregate
from rl.phases.phases import Phases
from rl.training.loss import Loss, Totals
from rl.training.packing import MicroBatch

NEEDS = ("samples", "teacher")
DEFAULTS = {"rollout.samples_per_prompt": 1}


def collect(phases: Phases) -> Batch:
    teacher, num_prompts = phases.config.teacher, phases.config.data.prompts_per_step
    num_own, num_taught = counts(
        num_prompts,
        before=(phases.step.number - 1) * num_prompts,
        student_share=teacher.student_share,
        teacher_share=teacher.teacher_share,
    )
    own = phases.draw_prompts(num_own) if num_own else []
    others = phases.draw_others(num_prompts - num_own)
    taught, given = others[:num_taught], others[num_taught:]
    parts = []
    if given:
        parts.append(replace(phases.targets(given), prompts=given))
    if taught:
        parts.append(phases.teacher_responses(taught))
    if own:
        parts.append(phases.generate(own))
    batch = parts[0] if len(parts) == 1 else mixed(parts, version=phases.engines.policy.version)
    if needs_feedback(phases.config):
        phases.score_samples(batch)
    return batch


def learn(phases: Phases, batch: Batch) -> None:
    if batch.rollout_logprobs is not None:
        phases.log_probs(batch)  # compares engine and trainer
    phases.distributions(batch)
    phases.update(batch, Loss(partial(loss, config=phases.config), reads=("divergence",)))


def counts(num_prompts: int, *, before: int, student_share: float, teacher_share: float) -> tuple[int, int]:
    """Return the numbers of a step's prompts for the policy and for the teacher.

    Summed over all steps so far, each number is its share of all prompts, rounded down. For example, with
    shares of 0.5 and 0.25, the policy gets 32 and the teacher 16 of the 64 prompts of the first step.

    before: number of prompts of the earlier steps.
    """

    def part(prompts: int, share: float) -> int:
        return int(prompts * share + 1e-6)

    after = before + num_prompts
    own_before, own_after = part(before, student_share), part(after, student_share)
    # The teacher's share of the prompts that the policy does not get, so that no prompt is in two parts.
    share = teacher_share / max(1 - student_share, teacher_share) if teacher_share else 0.0
    return own_after - own_before, part(after - own_after, share) - part(before - own_before, share)


def mixed(parts: list[Batch], *, version: int) -> Batch:
    """Return one batch; each of its mini-batches contains the parts in the parts' shares.

    The batch has only tokens and prompts. version: version of the policy. Tokens of the teacher and of the
    data get this version too, so that no check finds them too old.
    """
    bare = [
        Batch(
            prompt_ids=part.prompt_ids,
            response_ids=part.response_ids,
            groups=part.groups,
            truncated=part.truncated,
            prompts=part.prompts,
            digests=part.digests,
            weight_versions=torch.full((int(part.lengths.sum()),), version, dtype=torch.int32)
            if part.weight_versions is None
            else part.weight_versions,
        )
        for part in parts
    ]
    places = [(k + 0.5) / len(part.prompts) for part in bare for k in range(len(part.prompts))]
    return concatenate(bare).keep_groups(sorted(range(len(places)), key=places.__getitem__))


def loss(micro: MicroBatch, totals: Totals, *, config: Config) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean divergence, and its metrics."""
    mean_of = partial(aggregate, num_tokens=totals.num_tokens, num_samples=totals.num_samples)
    value = mean_of(
        micro.output("divergence"),
        micro.mask,
        micro.lengths,
        config.objective.aggregation,
        norm=config.rollout.max_response_tokens,
        counts=micro.columns.get("trajectory_tokens"),
    )
    mean = mean_of(micro.output("divergence").detach(), micro.mask, micro.lengths, "token-mean")
    return value, {"distill/divergence": mean}
