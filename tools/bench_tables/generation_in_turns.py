"""Generation as a side of a comparison: an algorithm that never updates the policy.

Named by `algorithm=tools/bench_tables/generation_in_turns.py`.
"""

from tools.bench_tables.sides import wait_for_turn

NEEDS = ("samples",)
DEFAULTS = {}


def collect(phases):
    with phases.timed("turn"):
        wait_for_turn(phases.step.number)
    batch = phases.generate(phases.draw_prompts())
    phases.step.metrics["generated_tokens"] = int(batch.lengths.sum())
    return batch.keep_groups([])


def learn(phases, batch):
    raise AssertionError("this algorithm only generates")
