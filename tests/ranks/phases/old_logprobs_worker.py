"""One rank of test_old_logprobs.py: a GRPO step with old log-probs from its only update or a separate pass.

    old_logprobs_worker.py CHECKPOINT OUT_FILE PIPELINE_STAGES

Rank 0 saves {case: {"separate" or "deferred": (metrics, weights, batch columns)}}.
"""

import os
import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

from types import SimpleNamespace  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from rl.algorithms import load  # noqa: E402
from rl.config.needs import needs_early_logprobs  # noqa: E402
from rl.config.schema import load_config  # noqa: E402
from rl.data.batch import Batch  # noqa: E402
from rl.engines.engines import Engines, build_policy  # noqa: E402
from rl.engines.memory import MemorySharing  # noqa: E402
from rl.faults.agreement import PhaseAgreement  # noqa: E402
from rl.faults.phase_tracker import PhaseTracker  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.phases import old_logprobs  # noqa: E402
from rl.phases.phases import Phases  # noqa: E402
from rl.phases.step_record import StepRecord  # noqa: E402
from rl.run_directory.progress import Progress  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.grid import build_grid  # noqa: E402
from rl.training.loss import Loss, TokenSelection  # noqa: E402

CASES = {
    "one update": ["objective.entropy_coef=0.1", "objective.kl_coef=0.1"],
    "weights": [
        "rollout_correction.icepop_low=0.8",
        "rollout_correction.icepop_high=1.2",
        "objective.top_entropy=0.5",
        "objective.off_policy_mask=0.001",
    ],
    "pairs": ["algorithm=spin"],
    "two epochs": ["training.epochs=2"],
    "several updates": ["training.prompts_per_minibatch=4"],
}
GROUPS, SAMPLES = 8, 2


def sampled(vocab_size: int, *, pairs: bool) -> Batch:
    """Return a batch as after generation and scoring; `step` fills in the engine's log-probs."""
    generator = torch.Generator().manual_seed(5)

    def tokens(most):
        length = int(torch.randint(1, most, (), generator=generator))
        return torch.randint(3, vocab_size, (length,), generator=generator).int().numpy()

    prompts = [tokens(9) for _ in range(GROUPS)]
    count = GROUPS * SAMPLES
    batch = Batch(
        prompt_ids=[prompts[i // SAMPLES] for i in range(count)],
        response_ids=[tokens(20) for _ in range(count)],
        groups=torch.arange(count) // SAMPLES,
        truncated=torch.zeros(count, dtype=torch.bool),
        samples_per_unit=SAMPLES if pairs else 1,
    )
    batch.mask = (torch.rand(len(batch.mask), generator=generator) > 0.2).float()
    batch.rewards = torch.rand(count, generator=generator)
    batch.rollout_logprobs = torch.randn(len(batch.mask), generator=generator) * 0.1
    return batch


def begun(overrides: list[str], *, separate: bool) -> tuple[Phases, Batch]:
    """Return the phases in step 1, and its batch."""
    keys = [f"model.path={sys.argv[1]}", "data.train=x.jsonl", f"data.prompts_per_step={GROUPS}"]
    keys += ["agreement.logprob_slack=0"]  # no engine sampled the tokens
    keys += ["model.dtype=float32", f"training.pp={sys.argv[3]}", "training.micro_batch_tokens=60"]
    config = load_config(None, ["training.optimizer.lr=1e-2", *keys, *overrides])
    assert not needs_early_logprobs(config)
    old_logprobs.needs_early_logprobs = lambda config: separate
    hf = read_hf_config(config.model.path)
    engines = Engines({"policy": build_policy(config, hf, GRID, DEVICE)})
    phases = Phases(
        config,
        step=StepRecord(
            device=DEVICE,
            progress=Progress(enabled=False),
            watchdog=SimpleNamespace(tracker=PhaseTracker(config.watchdog.limits, open(os.devnull, "w"))),
            agreement=PhaseAgreement(config, "", dist.group.WORLD),
        ),
        engines=engines,
        memory=MemorySharing(config, DEVICE, engines),
        draw=None,
        sampler=None,
        scorer=None,
    )
    phases.step.begin(1)
    batch = sampled(hf["vocab_size"], pairs=config.algorithm == "spin")
    plans = [plan.micro_batches for plan in phases.updates._planner.plans(batch)]
    batch.rollout_logprobs += engines.policy.forward(batch, plans, ("logprobs",))[0]
    return phases, batch


def results(phases: Phases, batch: Batch) -> tuple[dict, dict, dict]:
    return phases.metrics, dict(phases.engines.policy.full_weights()), batch.loss_columns()


def step(overrides: list[str], *, separate: bool) -> tuple[dict, dict, dict]:
    phases, batch = begun(overrides, separate=separate)
    waits: list[tuple[int, bool]] = []

    def wait() -> None:
        waits.append((phases.engines.policy.num_updates, "timing_s/old_log_prob" in phases.metrics))

    phases.memory.wait_for_readers = wait
    load(phases.config.algorithm).learn(phases, batch)
    # Every pass without gradients is before the wait, which is before the first update.
    assert waits == [(0, "timing_s/old_log_prob" in phases.metrics)]
    return results(phases, batch)


def selected_step(*, plain: bool) -> tuple[dict, dict, dict]:
    """Learn from tokens of high entropy, by a plain function or by a Loss that names what it reads."""
    phases, batch = begun(["training.prompts_per_minibatch=4"], separate=False)

    def loss(micro, totals):
        return -(micro.logprobs * micro.column("selected_tokens") * micro.mask).sum() / totals.num_tokens, {}

    def select(samples, entropy, seed):
        assert len(entropy) == len(samples.mask)
        return entropy > entropy.median()

    chosen = loss if plain else Loss(loss, reads=("logprobs",))
    phases.update(batch, chosen, select_tokens=TokenSelection(select, "entropy"))
    return results(phases, batch)


def negative_likelihood(micro, totals):
    return -(micro.logprobs * micro.mask).sum() / totals.num_tokens, {}


def refused(phases: Phases, batch: Batch) -> bool:
    """Return whether the update of a batch says that its old log-probs came too late."""
    before = phases.engines.policy.num_updates
    try:
        phases.update(batch, negative_likelihood)
    except RuntimeError as error:
        late = 'add "old_logprobs" to its NEEDS' in str(error)
        return late and batch.old_logprobs is None and phases.engines.policy.num_updates == before
    return False


def check_several_batches() -> None:
    """Old log-probs are deferred to the update of their own batch, and only while the weights are theirs."""
    phases, first = begun([], separate=False)
    first.rollout_logprobs = None  # an engine's log-probs would be of the weights before the first update
    second = first.select(list(reversed(range(len(first)))))
    phases.log_probs(first)
    phases.update(second, negative_likelihood)  # without log-probs
    assert second.old_logprobs is None and refused(phases, first)
    for batch in (first, second):
        phases.log_probs(batch)
    phases.update(first, negative_likelihood)
    assert first.old_logprobs is not None and refused(phases, second)
    phases.log_probs(second)
    part = second.select(list(range(0, len(second), 2)))
    phases.update(part, negative_likelihood)
    assert part.old_logprobs is not None and refused(phases, second)


if __name__ == "__main__":
    with session(RANKS) as DEVICE:
        GRID = build_grid(tp=1, pp=int(sys.argv[3]), seed=1)
        found = {
            case: {name: step(keys, separate=name == "separate") for name in ("separate", "deferred")}
            for case, keys in CASES.items()
        }
        found["selected tokens"] = {
            name: selected_step(plain=plain) for name, plain in (("separate", False), ("deferred", True))
        }
        check_several_batches()
        if dist.get_rank() == 0:
            torch.save(found, sys.argv[2])
        dist.barrier()
