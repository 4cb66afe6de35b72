"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv:2503.14476).

GRPO with four changes, each a key of its own:

- clip-higher: `objective.clip_high=0.28` above `clip_low=0.2`, so that rare tokens may become more likely;
- dynamic sampling: a group whose samples all have the same score has no advantage. Such groups are dropped and further
  prompts drawn, until the batch is full, in at most `dynamic_sampling.max_rounds` rounds; a step that is still short then
  trains on the groups there are. Groups left over from the last round are dropped;
- token-level loss: `objective.aggregation=token-mean`;
- soft overlong punishment: `reward.overlong_buffer_tokens`, off unless set (the paper: 4,096 of 20,480). The spread of a
  group is that of the scores before it.

No KL term. Seeds differ between rounds, so a prompt that comes again is sampled anew.
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
    """Return data.prompts_per_step groups whose scores differ, or as many as max_rounds rounds gave."""
    config = phases.config
    wanted = config.data.prompts_per_step
    kept: list[Batch] = []
    drawn: list[Batch] = []
    num_kept = 0
    while num_kept < wanted and len(drawn) < config.dynamic_sampling.max_rounds:
        prompts = phases.draw_prompts(config.dynamic_sampling.prompts_per_round or wanted)
        batch = phases.generate(prompts, round=len(drawn))
        phases.score_samples(batch, prompts)
        drawn.append(batch)
        differs = grpo(batch.scores, batch.groups, normalize_by_std=False) != 0
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
