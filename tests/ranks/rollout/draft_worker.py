"""One rank of test_drafts.py: generations with and without a draft model.

draft_worker.py CHECKPOINT OTHER TP SAMPLES
"""

import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import numpy as np  # noqa: E402

from rl.config.draft import Draft  # noqa: E402
from rl.config.rollout import Rollout  # noqa: E402
from rl.rollout.cpu_drafts import DraftedSampler  # noqa: E402
from rl.rollout.draft_check import chi_square, deviate  # noqa: E402
from rl.rollout.drafts import Drafts, WrongDistribution  # noqa: E402
from rl.rollout.engine import RolloutEngine  # noqa: E402
from rl.rollout.sampling import Sampling  # noqa: E402
from rl.rollout.sampling_masks import Masks  # noqa: E402
from rl.runtime.session import session  # noqa: E402

PROMPTS = [np.arange(5 + i, 12 + 2 * i, dtype=np.int32) for i in range(2)]
SETTINGS = ((1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (0.0, 1.0))
"""Temperature and top_p."""


def build(device, name: str, path: str, tp: int, draft: Draft | None) -> RolloutEngine:
    parts = [Masks(), *([Drafts(draft)] if draft else [])]
    rollout = Rollout(tp=tp, max_concurrent_samples=256, cpu_kv_cache_mib=16)
    options = dict(dtype="float32", max_tokens=64, seed=1, device=device, frozen=True)
    return RolloutEngine(path, rollout, name=name, parts=parts, **options)


def values(engine: RolloutEngine, sampling: Sampling) -> dict:
    """Return tokens, log-probs and sampling masks of each sample, as bytes."""
    samples = engine.generate(PROMPTS, sampling, [11, 12])
    return {
        (s.prompt, s.number): [
            array.tobytes()
            for segment in s.segments
            for array in (segment.token_ids, segment.logprobs, *segment.held.values())
        ]
        for s in samples
    }


RIGHT_ROWS = DraftedSampler._rows


def one_number_per_step(self):
    """Use the random number of a step's first token for its other tokens too."""
    names, positions = RIGHT_ROWS(self)
    if self.counts is not None:
        positions = np.repeat(positions[np.cumsum(self.counts) - self.counts], self.counts)
    return names, positions


def main(path: str, other: str, tp: int, num_samples: int) -> None:
    with session(RANKS) as device:
        plain = build(device, "plain", path, tp, None)
        same = build(device, "same", path, tp, Draft(path, 3, 1.0))
        for temperature, top_p in SETTINGS:
            sampling = Sampling(num_samples, temperature, top_p, 0, 0.0, 24, (), ())
            assert values(plain, sampling) == values(same, sampling)
            metrics = same.parts[-1].metrics(same)
            assert metrics["perf/draft_acceptance/1"] > 0.99, metrics
            assert metrics["perf/draft_tokens_per_step"] > 3.9 and metrics["perf/drafts_on"] == 1.0
        same.parts[-1].check(same, PROMPTS[0])  # raises nothing
        same.parts = [part for part in same.parts if not isinstance(part, Masks)]
        same.runner.sampler.masks = None  # they are stored by position
        DraftedSampler._rows, rows = one_number_per_step, DraftedSampler._rows
        try:
            same.parts[-1]._is_checked = False
            same.parts[-1].check(same, PROMPTS[0])
            raise AssertionError("the check did not find the wrong distribution")
        except WrongDistribution as error:
            print(error)
        DraftedSampler._rows = rows
        useless = build(device, "useless", path, tp, Draft(other, 2, 0.0))
        sampling = Sampling(64, 1.0, 1.0, 0, 0.0, 24, (), ())
        assert values(plain, sampling) == values(useless, sampling)
        metrics = useless.parts[-1].metrics(useless)
        assert metrics["perf/drafts_on"] == 0.0 and metrics["perf/draft_tokens_per_step"] < 1.5, metrics
        if num_samples > 1000:
            chi_squares(build(device, "near", path, tp, Draft(other, 3, 1.0)))
    print("drafts are right")


def chi_squares(engine: RolloutEngine) -> None:
    """Compare 1e5 tokens of each setting that samples with their reported log-probs."""
    for temperature, top_p in SETTINGS[:-1]:
        samples = engine.generate(PROMPTS[:1], Sampling(34_000, temperature, top_p, 0, 0.0, 3, (), ()), [3])
        found = chi_square((s.token_ids, s.segments[0].logprobs) for s in samples)
        num_tokens = sum(len(s.token_ids) for s in samples)
        print(temperature, top_p, num_tokens, found, deviate(*found), engine.parts[-1].metrics(engine))
        assert not engine.leads or (num_tokens > 9e4 and found[1] > 100 and deviate(*found) < 5)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
