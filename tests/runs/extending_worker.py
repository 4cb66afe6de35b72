"""Uses what the worked examples of docs/extending.md add. Runs in a tree that they have been applied to."""

from types import SimpleNamespace

import numpy as np
import torch
from rl.features.agents.shipped.boxes import Boxes
from rl.rewards.choice import score
from tools.prepare_arc import arc_row

from rl.algorithms import raft
from rl.config.agent_plan import EnvironmentSpec
from rl.config.checks import check
from rl.config.command_line import help_text
from rl.config.options import ConfigError
from rl.config.schema import Config, load_config
from rl.data.batch import Batch
from rl.features.agents.environment import load_environment
from rl.models import SUPPORTED, aquila, architecture
from rl.phases.policy_gradient import advantages, policy_loss
from rl.training.loss import Totals
from rl.training.packing import pack
from tools.docs.tables import formula_tables


def config_with(*overrides):
    return load_config(None, ["model.path=toy", "data.train=toy.jsonl", *overrides])


def error(*overrides) -> str:
    try:
        check(config_with(*overrides))
    except ConfigError as found:
        return str(found)
    raise AssertionError(f"no ConfigError for {overrides}")


# Configuration, help and tables
assert check(config_with("algorithm=raft")) == []
config = config_with("objective.advantage=grpo-median", "objective.loss=ppo-kl", "objective.ppo_kl_coef=0.5")
assert check(config) == []
assert "set objective.loss=ppo-kl" in error("objective.ppo_kl_coef=0.5")
assert "0 or more and finite" in error("objective.loss=ppo-kl", "objective.ppo_kl_coef=-1")
assert "ppo-kl: weight of the divergence from the old policy" in " ".join(help_text(Config, 110).split())
assert "- `grpo-median` (worked example): r - median_G r." in formula_tables()["advantages"]
assert "`ppo_kl_coef` 1.0" in formula_tables()["losses"]

# Advantage and loss
batch = Batch(
    prompt_ids=[np.ones(2, np.int32)] * 5,
    response_ids=[np.arange(n, dtype=np.int32) for n in (1, 2, 1, 3, 1)],
    groups=torch.tensor([0, 0, 0, 1, 1]),
    truncated=torch.zeros(5, dtype=torch.bool),
)
batch.rewards = torch.tensor([1.0, 7.0, 2.0, 0.0, 4.0])
assert advantages(batch, config).tolist() == [-1.0, 5.0, 5.0, 0.0, -2.0, -2.0, -2.0, 2.0]
batch.advantages, batch.old_logprobs = torch.ones(8), torch.full((8,), -1.0)
micro = pack(batch, list(range(5)), multiple=1, device=torch.device("cpu"))
micro.outputs["logprobs"] = torch.zeros(8, requires_grad=True)
value, metrics = policy_loss(config)(micro, Totals(8.0, 5.0, 5.0))
assert abs(float(value) - (-np.e + 0.5 * (np.e - 2))) < 1e-5, value
assert float(metrics["actor/ppo_kl"]) == -1.0

# Algorithm
phases = SimpleNamespace(
    draw_prompts=lambda: [], generate=lambda prompts: batch, score_samples=lambda batch: None
)
assert raft.collect(phases).rewards.tolist() == [7.0, 4.0]

# Environment
boxes = [
    "algorithm=grpo",
    "agents.environment=rl.features.agents.shipped.boxes:Boxes",
    "rollout.max_response_tokens=64",
]
assert check(config_with(*boxes)) == []
loaded = load_environment(EnvironmentSpec("rl.features.agents.shipped.boxes:Boxes", {}))
assert list(loaded.tools_for({})) == ["answer", "look"]
game = Boxes()
assert "boxes 1, 2 and 3" in game.reset({"seed": 3})[0]["content"] and not game.done
game.answer(sum(int(game.look(box)) for box in (1, 2, 3)))
assert game.done and game.score() == 1.0 and game.look(4) == "There is no such box."

# Reward, dataset, model
assert score("", "A or B? It is B.", "B") == {"score": 1.0, "acc": 1.0, "pred": "B"}
assert score("", "It is", "B")["acc"] == 0.0
choices = [{"label": "A", "text": "red"}, {"label": "B", "text": "blue"}]
row = arc_row({"question": {"stem": "Sky?", "choices": choices}, "answerKey": "B"}, 0)
assert row["reward_model"]["ground_truth"] == "B"
assert row["prompt"][0]["content"].startswith("Sky?\nA. red\nB. blue")
assert "AquilaForCausalLM" in SUPPORTED
assert architecture({"architectures": ["AquilaForCausalLM"]}) is aquila
