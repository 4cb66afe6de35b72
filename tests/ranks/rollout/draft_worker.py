"""One rank of test_drafts.py: generations with and without drafts.

    draft_worker.py CHECKPOINT OTHER TP SAMPLES

OTHER is another draft model than the policy itself, or mtp: then the policy's head proposes the tokens.
"""

import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import numpy as np  # noqa: E402

from rl.config.draft import Draft  # noqa: E402
from rl.config.rollout import Rollout  # noqa: E402
from rl.features.drafts.check import chi_square, deviate  # noqa: E402
from rl.features.drafts.drafts import SOURCES, WrongDistribution  # noqa: E402
from rl.features.sampling_masks.engine import Masks  # noqa: E402
from rl.rollout.cpu_drafts import DraftedSampler  # noqa: E402
from rl.rollout.engine import RolloutEngine  # noqa: E402
from rl.rollout.sampling import Sampling  # noqa: E402
from rl.rollout.vllm_model import ServedModel  # noqa: E402
from rl.runtime.session import session  # noqa: E402

PROMPTS = [np.arange(5 + i, 12 + 2 * i, dtype=np.int32) for i in range(2)]
SETTINGS = ((1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (0.0, 1.0))
"""Temperature and top_p."""


def build(device, name: str, path: str, tp: int, draft: Draft | None) -> RolloutEngine:
    parts = [Masks(), *([SOURCES[draft.method](draft)] if draft else [])]
    rollout = Rollout(tp=tp, max_concurrent_samples=256, cpu_kv_cache_mib=16)
    model = ServedModel(path, "float32", max_tokens=64, frozen=True)
    return RolloutEngine(model, rollout, seed=1, device=device, name=name, parts=parts)


def assert_equal_samples(one: RolloutEngine, other: RolloutEngine, sampling: Sampling) -> None:
    """Compare tokens, sampling masks and log-probs of the samples of two engines bitwise.

    With latent attention log-probs are rounded, because products over several tokens add in another order.
    """
    found = [
        {(s.prompt, s.number): s.segments[0] for s in engine.generate(PROMPTS, sampling, [11, 12])}
        for engine in (one, other)
    ]
    assert found[0].keys() == found[1].keys()
    tolerance = 1e-4 if "kv_lora_rank" in one.hf else 0.0
    for name, segment in found[0].items():
        same = found[1][name]
        assert np.array_equal(segment.token_ids, same.token_ids), name
        assert np.allclose(segment.logprobs, same.logprobs, rtol=0, atol=tolerance), name
        for column, values in segment.held.items():
            assert values.tobytes() == same.held[column].tobytes(), (name, column)


RIGHT_ROWS = DraftedSampler._rows


def one_number_per_step(self):
    """Use the random number of a step's first token for its other tokens too."""
    names, positions = RIGHT_ROWS(self)
    if self.counts is not None:
        positions = np.repeat(positions[np.cumsum(self.counts) - self.counts], self.counts)
    return names, positions


LARGE = 1_000_000
"""Samples of a generation whose test has the most samples: a random head's drafts are rarely accepted."""


def main(path: str, other: str, tp: int, num_samples: int) -> None:
    is_head = other == "mtp"
    near, far = (dict(method="mtp") if is_head else dict(path=each) for each in (path, other))
    with session(RANKS) as device:
        plain = build(device, "plain", path, tp, None)
        same = build(device, "same", path, tp, Draft(**near, tokens=3, min_tokens_per_step=1.0))
        for temperature, top_p in SETTINGS:
            # Each of the head's tokens takes several times as long as one of a Qwen2.
            number = min(64, num_samples) if is_head else num_samples
            sampling = Sampling(number, 24, temperature, top_p)
            assert_equal_samples(plain, same, sampling)
            metrics = same.parts[-1].metrics(same)
            print(temperature, top_p, metrics)
            assert metrics["perf/drafts_on"] == 1.0
            assert (
                metrics["perf/draft_tokens_per_step"] > 1.0 or not temperature
            )  # a random head may never agree
            if not is_head:
                assert metrics["perf/draft_acceptance/1"] > 0.99, metrics
                assert metrics["perf/draft_tokens_per_step"] > 3.9
        same.parts[-1].check(same, PROMPTS[0], LARGE)  # raises nothing
        same.parts = [part for part in same.parts if not isinstance(part, Masks)]
        same.runner.sampler.masks = None  # they are stored by position
        DraftedSampler._rows, rows = one_number_per_step, DraftedSampler._rows
        try:
            same.parts[-1]._is_checked = False
            same.parts[-1].check(same, PROMPTS[0], LARGE)
            raise AssertionError("the check did not find the wrong distribution")
        except WrongDistribution as error:
            print(error)
        DraftedSampler._rows = rows
        useless = build(device, "useless", path, tp, Draft(**far, tokens=2))
        sampling = Sampling(64, 24)
        assert_equal_samples(plain, useless, sampling)
        metrics = useless.parts[-1].metrics(useless)
        assert metrics["perf/drafts_on"] == 0.0 and metrics["perf/draft_tokens_per_step"] < 1.5, metrics
        if num_samples > 1000:
            chi_squares(build(device, "near", path, tp, Draft(**far, tokens=3, min_tokens_per_step=1.0)))
    print("drafts are right")


def chi_squares(engine: RolloutEngine) -> None:
    """Compare 1e5 tokens of each setting that samples with their reported log-probs."""
    for temperature, top_p in SETTINGS[:-1]:
        samples = engine.generate(PROMPTS[:1], Sampling(34_000, 3, temperature, top_p), [3])
        found = chi_square((s.token_ids, s.segments[0].logprobs) for s in samples)
        num_tokens = sum(len(s.token_ids) for s in samples)
        print(temperature, top_p, num_tokens, found, deviate(*found), engine.parts[-1].metrics(engine))
        assert not engine.leads or (num_tokens > 9e4 and found[1] > 100 and deviate(*found) < 5)


main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
