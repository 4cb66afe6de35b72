"""train_rl.py with a planted change: `parted_train.py STAGE STEP <arguments of train_rl.py>`. The first
difference from a run without the change is in this stage of this step."""

import sys
from typing import Any

import train_rl

step = 0
"""Number of the present step, which each draw of prompts begins."""


def other_prompts(rows: list) -> list:
    return [*rows[1:], rows[0]]


def other_logprob(batch: Any) -> Any:
    batch.rollout_logprobs[5] += 1e-2
    return batch


def other_score(found: tuple) -> tuple:
    found[0]["score"][3] += 0.25
    return found


def plant(stage: str, at: int) -> None:
    """Replace functions of the program so that the stage differs in step `at`."""
    from rl.algorithms import grpo
    from rl.phases.draw import Draw
    from rl.phases.old_logprobs import OldLogprobs
    from rl.phases.phases import Phases
    from rl.phases.scorer import Scorer

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
        change(Scorer, "score", after=other_score)
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
