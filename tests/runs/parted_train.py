"""train_rl.py with a planted change: `parted_train.py STAGE STEP <arguments of train_rl.py>`. The first
difference from a run without the change is in this stage of this step."""

import pickle
import sys
from typing import Any

import train_rl

step = 0
"""Number of the present step, which each draw of prompts begins."""
pool_score: Any = None
"""`ScoringPool.score` of the program."""


def other_prompts(rows: list) -> list:
    return [*rows[1:], rows[0]]


def other_logprob(batch: Any) -> Any:
    batch.rollout_logprobs[5] += 1e-2
    return batch


def other_score(pool: Any, samples: list, **options: Any) -> list:
    """Return the scores of the samples, as if the reward function had given the first one another score."""
    from rl.checks.grades import calls_of
    from rl.rewards.score import Score, digest, sealed

    first, *scores = pool_score(pool, samples, **options)
    values = first.values | {"score": first.values["score"] + 0.25}
    parts = tuple(part + 0.25 for part in first.parts)
    plan, _ = pickle.loads(pool._initialization)
    other = Score(values, first.prediction, parts=parts)
    return [sealed(other, digest(calls_of(plan, samples[0]))), *scores]


def plant(stage: str, at: int) -> None:
    """Replace functions of the program so that the stage differs in step `at`."""
    from rl.algorithms import grpo
    from rl.phases.draw import Draw
    from rl.phases.old_logprobs import OldLogprobs
    from rl.phases.phases import Phases
    from rl.rewards.pool.pool import ScoringPool

    global pool_score
    pool_score = ScoringPool.score

    def change(owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        original = getattr(owner, name)

        def changed(*args: Any, **options: Any) -> Any:
            if step == at and before is not None:
                args, options = before(*args, **options)
            result = original(*args, **options)
            return after(result) if step == at and after is not None else result

        setattr(owner, name, changed)

    def count_steps(*args: Any) -> list:
        global step
        step += 1
        rows = draw(*args)
        return other_prompts(rows) if stage == "prompts" and step == at else rows

    draw, Draw.next = Draw.next, count_steps
    if stage == "tokens":
        change(Phases, "generate", before=lambda *args, round=0: (args, {"round": 1}))
    elif stage == "engine log-probs":
        change(Phases, "generate", after=other_logprob)
    elif stage == "scores":

        def score(pool: Any, samples: list, **options: Any) -> list:
            return (other_score if step == at else pool_score)(pool, samples, **options)

        ScoringPool.score = score
    elif stage == "old log-probs":

        def with_another(self: Any, batch: Any, logprobs: Any, *rest: Any) -> tuple:
            logprobs[5] += 1e-2
            return (self, batch, logprobs, *rest), {}

        change(OldLogprobs, "fill", before=with_another)
    elif stage == "weights":
        learn = grpo.learn

        def and_change_a_weight(phases: Any, batch: Any) -> None:
            learn(phases, batch)
            if step == at:
                parameters = dict(phases.engines.policy.model.named_parameters())
                parameters["decoder.layers.0.mlp.linear_fc2.weight"].data.view(-1)[7] += 0.01

        grpo.learn = and_change_a_weight


if __name__ == "__main__":
    _, stage, at, *arguments = sys.argv
    sys.argv = [train_rl.__file__, *arguments]
    plant(stage, int(at))
    train_rl.main()
