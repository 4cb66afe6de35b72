"""train_rl.py with roles, and a probe: `roles_worker.py PROBE <arguments of train_rl.py>`.

gap: the trainers append to <run.dir>/gap.txt how far the engine's log-probs of tokens of the newest weights,
in samples that older weights began, are from their own.
old_labels: the generators label tokens from the second version on with the version before.
"""

import sys
from pathlib import Path

import train_rl


def gap() -> None:
    from rl.phases.old_logprobs import OldLogprobs

    original = OldLogprobs.fill

    def fill(self, batch, logprobs, *rest):
        versions = batch.weight_versions
        for first, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()):
            own = versions[first:end]
            if own.min() < own.max() == self._policy.version:
                far = (logprobs[first:end] - batch.rollout_logprobs[first:end]).abs()
                with Path(self._config.run.dir, "gap.txt").open("a") as file:
                    file.write(f"{float(far[own == own.max()].max())}\n")
        original(self, batch, logprobs, *rest)

    OldLogprobs.fill = fill


def old_labels() -> None:
    from rl.rollout.calls import Calls

    original = Calls.note_version

    def note_version(self, version):
        original(self, max(0, version - 1))

    Calls.note_version = note_version


if __name__ == "__main__":
    import rl.training  # noqa: F401  # makes Megatron work without CUDA, before anything imports it

    probe, *sys.argv[1:] = sys.argv[1:]
    run = train_rl.watched_run

    def probed_run(config, points, ranks, device):
        {"gap": gap, "old_labels": old_labels}[probe]()
        return run(config, points, ranks, device)

    train_rl.watched_run = probed_run
    train_rl.leave(train_rl.main())
