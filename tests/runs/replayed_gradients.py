"""GRPO that also checks the gradient with replayed experts against routers fixed by hand to these experts.

The experts of both are others than any router would choose. The difference of a weight's gradient is relative
to the whole gradient.
"""

from rl.algorithms import grpo
from rl.features.router_replay.trainer import RouterReplay
from rl.runtime.collectives import gather_objects
from tests.ranks.training.fixed_routers import gradient, gradient_by_hand, use_other_experts, worst

NEEDS = ("samples", "reward", "groups")
DEFAULTS = {"objective.advantage": "grpo", "objective.loss": "ppo"}


def collect(phases):
    return grpo.collect(phases)


def learn(phases, batch):
    trainer = phases.engines.policy
    phases.memory.to_training()
    plan = phases.updates.plans(batch)[-1]
    other = batch.select(list(range(len(batch))))
    use_other_experts(other, trainer.model.config.num_moe_experts)
    is_shared, trainer.shares_prompts = trainer.shares_prompts, False
    replayed, own = (gradient(trainer, each, plan.micro_batches) for each in (other, batch))
    by_hand = gradient_by_hand(trainer, other, plan.micro_batches)
    trainer.shares_prompts = is_shared
    trainer.parts.get(RouterReplay)._counts.zero_()  # of experts that no engine chose
    assert max(gather_objects(worst(replayed, by_hand))) <= 1e-6
    assert max(gather_objects(worst(own, by_hand))) > 1e-2
    grpo.learn(phases, batch)
