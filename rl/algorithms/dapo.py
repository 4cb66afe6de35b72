"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv:2503.14476).

DAPO is GRPO with four changes, each with a key of its own:

- Clip-higher: `objective.clip_high=0.28` above `clip_low=0.2`, so that unlikely tokens may become more
  likely.
- Dynamic sampling: a group with equal scores has no advantage. Such groups are dropped and further prompts
  are drawn until the batch is full, in at most `dynamic_sampling.max_rounds` rounds. A step that is still
  short trains on the groups it has. Surplus groups of the last round are dropped.
- Token-level loss: `objective.aggregation=token-mean`.
- Soft overlong penalty: `reward.overlong_buffer_tokens`, off by default (the paper: 4,096 of 20,480). Dynamic
  sampling compares the scores of a group before the penalty.

There is no KL term. Seeds differ between rounds.

Left out: overlong filtering, because the soft penalty treats truncated responses too.
"""

from rl.data.batch import Batch, concatenate
from rl.objectives.advantages.grpo import grpo
from rl.phases.phases import Phases
from rl.phases.policy_gradient import advantages, policy_loss, token_selection

NEEDS = ("samples", "reward", "groups", "dynamic_sampling")
DEFAULTS = {
    "objective.advantage": "grpo",
    "objective.loss": "ppo",
    "objective.clip_high": 0.28,
    "objective.aggregation": "token-mean",
}


def collect(phases: Phases) -> Batch:
    """Return data.prompts_per_step groups, each with different scores, or fewer after max_rounds rounds."""
    config = phases.config
    wanted = config.data.prompts_per_step
    kept: list[Batch] = []
    drawn: list[Batch] = []
    num_kept = 0
    while num_kept < wanted and len(drawn) < config.dynamic_sampling.max_rounds:
        prompts = phases.draw_prompts(config.dynamic_sampling.prompts_per_round or wanted)
        batch = phases.generate(prompts, round=len(drawn))
        phases.score_samples(batch)
        drawn.append(batch)
        differs = grpo(batch.column("scores"), batch.groups, normalize_by_std=False) != 0
        # For example, eight correct answers to a prompt have equal scores and teach nothing.
        informative = batch.groups[differs].unique().tolist()[: wanted - num_kept]
        num_kept += len(informative)
        if informative:
            kept.append(batch.keep_groups(informative))
    everything = concatenate(drawn)
    phases.log_generated(everything)
    phases.metrics["dapo/rounds"] = len(drawn)
    phases.metrics["dapo/drawn_groups"] = int(everything.groups.max()) + 1
    phases.metrics["dapo/kept_groups"] = num_kept
    return concatenate(kept) if kept else everything.keep_groups([])


def learn(phases: Phases, batch: Batch) -> None:
    phases.log_probs(batch)
    phases.apply_kl_penalty(batch)
    with phases.timed("adv"):
        batch.advantages = advantages(batch, phases.config)
    phases.update(batch, policy_loss(phases.config), select_tokens=token_selection(phases.config))
