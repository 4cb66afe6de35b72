"""One rank of test_kv_offload.py: turns of several dialogues in engines with and without offloading.

kv_offload_worker.py CHECKPOINT TP GIB
"""

import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import numpy as np  # noqa: E402

from rl.config.rollout import Rollout  # noqa: E402
from rl.features.kv_offload.kv_offload import KvOffload  # noqa: E402
from rl.rollout.engine import RolloutEngine  # noqa: E402
from rl.rollout.sampling import Sampling  # noqa: E402
from rl.rollout.vllm_model import ServedModel  # noqa: E402
from rl.runtime.session import session  # noqa: E402

DIALOGUES, TURNS = 6, 3
"""The engine's cache holds the tokens of about half of the dialogues."""


def turns(engine: RolloutEngine) -> tuple[list[list[float]], list[float]]:
    """Return tokens and log-probs of each turn of all dialogues, and the numbers of tokens that were loaded.

    The dialogues take turns one after the other.
    """
    contexts = [np.random.default_rng(i).integers(5, 90, 300, dtype=np.int32) for i in range(DIALOGUES)]
    found, loaded = [], []
    for turn in range(TURNS):
        for number, context in enumerate(contexts):
            samples = engine.generate([context], Sampling(1, 40), [10 * turn + number])
            for sample in samples:
                found.append([*sample.token_ids.tolist(), *sample.segments[0].logprobs.tolist()])
            # Only the leader has the tokens; any continuation that all ranks know serves.
            more = np.random.default_rng(100 * turn + number).integers(5, 90, 150, dtype=np.int32)
            contexts[number] = np.concatenate([context, more])
            loaded.append(engine.parts[-1].metrics(engine).get("perf/kv_loaded_tokens", 0.0))
    return found, loaded


def build(device, path, name, tp, gib):
    rollout = Rollout(tp=tp, max_concurrent_samples=8, cpu_kv_cache_mib=1)
    model = ServedModel(path, "float32", max_tokens=800, frozen=True)
    parts = [KvOffload(gib)] if gib else []
    return RolloutEngine(model, rollout, seed=1, device=device, name=name, parts=parts)


def change(engine: RolloutEngine) -> None:
    """Write other weights, as a refit does."""
    for parameter in engine.model.parameters():
        parameter.data.mul_(1.5)
    engine.weights_changed()


def main(path: str, tp: int, gib: float) -> None:
    with session(RANKS) as device:
        results = []
        for name, size in (("plain", 0), ("offloading", gib)):  # vLLM has one such cache per process
            engine = build(device, path, name, tp, size)
            first = turns(engine)
            change(engine)
            results.append((first, turns(engine)))
        for (expected, _), (found, loaded) in zip(*results):
            print(loaded)
            assert found == expected
            assert not any(loaded[:DIALOGUES]) and sum(loaded) > (1000 if gib > 0.01 else 100), loaded
    print("offloading is right")


main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
