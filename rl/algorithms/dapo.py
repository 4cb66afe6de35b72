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

from rl.config.schema import Config
from rl.data.batch import Batch, concatenate
from rl.objectives.advantages import grpo
from rl.phases.phases import Phases
from rl.phases.policy_gradient import advantages, policy_loss, token_choice

NEEDS = ("samples", "reward", "groups", "dynamic_sampling")
DEFAULTS = {
    "objective.advantage": "grpo",
    "objective.loss": "ppo",
    "objective.clip_high": 0.28,
    "objective.aggregation": "token-mean",
}


def step(phases: Phases, config: Config) -> None:
    batch = sample_until_full(phases, config)
    if batch is None:
        return  # not one group has anything to teach
    phases.log_probs(batch)
    phases.reward_tokens(batch)
    with phases.timed("adv"):
        batch.advantages = advantages(batch, config)
    phases.update(batch, policy_loss(config), choose=token_choice(config))


def sample_until_full(phases: Phases, config: Config) -> Batch | None:
    """data.prompts_per_step groups whose scores differ, or as many as max_rounds rounds gave; None for none."""
    wanted = config.data.prompts_per_step
    kept: list[Batch] = []
    drawn: list[Batch] = []
    num_kept = rounds = 0
    while num_kept < wanted and rounds < config.dynamic_sampling.max_rounds:
        prompts = phases.draw_prompts(config.dynamic_sampling.prompts_per_round or wanted)
        batch = phases.generate(prompts, round=rounds)
        phases.score(batch, prompts)
        rounds += 1
        drawn.append(batch)
        spread = grpo(batch.scores, batch.groups, normalize_by_std=False) != 0
        teaching = batch.groups[spread].unique().tolist()[: wanted - num_kept]
        if teaching:
            kept.append(batch.keep_groups(teaching))
            num_kept += len(teaching)
    everything = concatenate(drawn)
    phases.log_generated(everything)
    phases.metrics |= {
        "dapo/rounds": rounds,
        "dapo/drawn_groups": int(everything.groups.max()) + 1,
        "dapo/kept_groups": num_kept,
    }
    return concatenate(kept) if kept else None
