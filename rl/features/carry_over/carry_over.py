"""Carries groups over: a step ends when enough groups are complete, and the other groups continue in the next
step.

A generation starts with `rollout.oversample` times the number of groups that it has to return, and it ends
when enough groups are complete. For example, with oversample 1.5 a step of 8 groups starts with 12 groups,
including the carried groups, and ends when 8 groups are complete. The other groups are carried over with the
log-prob and the weight version of every token. All ranks hold the same carried groups, because the ranks
exchange the new tokens of these groups in the same way as complete samples. docs/asynchrony.md has the rules.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from rl.checkpoint.start import check_restored
from rl.checks.batches import check_staleness
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.held import ColumnBytes
from rl.data.prompts import Prompt
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.features.carry_over.check import check_groups
from rl.features.carry_over.quota_schedule import Frontier, QuotaSchedule, extend, samples_of, work_of
from rl.phases.dialogues import Dialogues
from rl.phases.generation import Generation
from rl.phases.sampler import SampleCall
from rl.phases.step_record import StepRecord
from rl.rollout import held_parts
from rl.rollout.sampled_group import SampledGroup
from rl.rollout.samples import Sample
from rl.rollout.sampling import seed_of, train_sampling
from rl.run_directory.consumed import ConsumedLog
from rl.stopping.requests import StepAborted, StopRequests


class CarryOver(Generation):
    """Generates samples, and keeps unfinished groups until a step consumes or drops them.

    Args:
        prompts: all prompts of the data. A resumed run looks up the prompts of its carried groups here.
    """

    varies_limits = True

    def __init__(
        self,
        config: Config,
        step: StepRecord,
        engines: Engines,
        memory: MemorySharing,
        stop: StopRequests | None,
        dialogues: Dialogues | None = None,
        *,
        prompts: Sequence[Prompt],
    ):
        super().__init__(config, step, engines, memory, stop, dialogues)
        self._prompts, self._sampling = prompts, train_sampling(config)
        self.frontier = Frontier()
        """The carried groups. A checkpoint stores the frontier."""
        self._num_wanted = 0
        self._moved = ColumnBytes()
        self._consumed: list[SampledGroup] = []
        self._dropped: list[SampledGroup] = []
        self._consumed_log = ConsumedLog(config.run.dir)

    def num_to_draw(self, num_wanted: int) -> int:
        self._num_wanted = num_wanted
        total = math.ceil(num_wanted * self._config.rollout.oversample - 1e-9)
        return max(0, total - len(self.frontier.groups))

    def batch(self, prompts: list[Prompt], *, round: int = 0) -> Batch:
        """Continue the carried groups, and start a group for each prompt, until enough groups are complete.

        Returns a batch of the complete groups with the oldest tokens. The number of groups is the argument of
        the last `num_to_draw`. After a stop request, every rank raises StepAborted, and the frontier is
        unchanged.
        """
        config, version = self._config.rollout, self._policy.version
        oldest_allowed = version + 1 - config.max_staleness  # oldest version that the next step accepts
        carried, first = self.frontier.groups, self.frontier.num_drawn
        new = [replace(prompt, draw=first + place) for place, prompt in enumerate(prompts)]
        new = [new[place] for place in self._order(prompts) or range(len(new))]
        groups = [*carried, *(SampledGroup.of(prompt, config.samples_per_prompt) for prompt in new)]
        complete = [group for group in carried if not group.unfinished]
        # The oldest groups come first. Groups without tokens come last, in the given order.
        unfinished = sorted((group for group in groups if group.unfinished), key=lambda group: group.oldest)
        due: set[int] = set()
        if config.on_stale == "finish":
            due = {i for i, group in enumerate(unfinished) if group.oldest < oldest_allowed}
        ending = [unfinished[i] for i in due]
        num_missing, purpose = self._num_wanted - len(complete), self._purpose(round)
        if num_missing > 0 or due:
            unfinished = extend(unfinished, self._continue(unfinished, due, num_missing, purpose))
            complete += [group for group in unfinished if not group.unfinished]
        complete.sort(key=lambda group: (group.oldest, group.prompt.draw))
        taken = complete[: self._num_wanted]
        rest = [*complete[self._num_wanted :], *(group for group in unfinished if group.unfinished)]
        kept = sorted((g for g in rest if g.oldest >= oldest_allowed), key=lambda group: group.prompt.draw)
        self.frontier = Frontier(tuple(kept), first + len(prompts))
        dropped = [group for group in rest if group.oldest < oldest_allowed]
        parts = dict(taken=taken, carried=kept, dropped=dropped, due=ending)
        limit = config.max_staleness
        check_groups(groups, self.frontier.num_drawn, **parts, version=version, max_staleness=limit)
        self._consumed += taken
        self._dropped += dropped
        self._log_metrics()
        held = (group for group in kept if group.holder == dist.get_rank())
        self._dialogues.keep_only({(group.prompt.draw, n) for group in held for n in group.unfinished})
        samples = self._collected(samples_of(taken))
        call = SampleCall([group.prompt for group in taken], self._sampling, purpose)
        return self._noted(self._dialogues.batch(samples, call))

    def _collected(self, samples: list[Sample]) -> list[Sample]:
        """Collect each sample's held values on the rank that generated its last tokens.

        Returns the samples.
        """
        holders = [sample.holder for sample in samples]
        samples, moved = held_parts.collect(samples, holders, self._step.device.torch)
        self._moved += moved
        return samples

    def _continue(
        self, groups: list[SampledGroup], due: set[int], num_missing: int, purpose: str
    ) -> list[Sample]:
        """Generate until at least `num_missing` groups, and all groups in `due`, are complete.

        due: indices of groups. Returns the continued samples.
        """
        engine, sampling, dialogues = self._engine, self._sampling, self._dialogues
        contexts = [np.concatenate([g.prompt.token_ids, *(s.token_ids for s in g.samples)]) for g in groups]
        seeds = [seed_of(self._config.run.seed, "draw", group.prompt.draw) for group in groups]

        def schedule() -> QuotaSchedule:
            is_fixed = self._config.rollout.deterministic or dialogues.is_fixed
            queue, quota = work_of(engine, groups, due, num_missing, holds=dialogues.holds, is_fixed=is_fixed)
            return QuotaSchedule(groups, due, sampling, seeds, queue=queue, quota=quota)

        call = SampleCall([group.prompt for group in groups], sampling, purpose)
        try:
            return self._run(call, contexts, schedule, total=num_missing * sampling.samples_per_prompt)
        except StepAborted:
            dialogues.keep_only(())  # open trajectories may be ahead of the frontier, which is unchanged
            raise

    def _log_metrics(self) -> None:
        groups = self.frontier.groups
        started = [row for group in groups for row in group.samples if row.is_unfinished]
        lengths = [len(row.token_ids) for row in started if len(row.token_ids)]
        self._step.metrics |= {
            "carry_over/groups": len(groups),
            "carry_over/complete_groups": sum(not group.unfinished for group in groups),
            "carry_over/samples": sum(not row.row for row in started if len(row.token_ids)),
            "carry_over/tokens": sum(lengths),
            "carry_over/dropped_groups": len(self._dropped),
        }

    def check(self, batch: Batch) -> None:
        """Log the staleness of the batch, and the bytes of its held columns.

        Raises StaleTokens if a token is older than `rollout.max_staleness` allows.
        """
        limit = self._config.rollout.max_staleness
        self._step.metrics |= check_staleness(batch, self._policy.version, limit)
        self._log_held(batch, self._moved)
        self._moved = ColumnBytes()

    def learned(self) -> None:
        """Write the prompts that this step consumed and dropped, and the waiting ones, to `consumed.jsonl`.

        Only rank 0 writes.
        """
        if dist.get_rank() == 0:
            self._step.fence()
            parts = {"consumed": self._consumed, "dropped": self._dropped, "waiting": self.frontier.groups}
            self._consumed_log.append(
                self._step.number,
                num_drawn=self.frontier.num_drawn,
                **{name: [(g.prompt.draw, g.prompt.index) for g in own] for name, own in parts.items()},
            )
        self._consumed, self._dropped = [], []

    def cursor(self) -> dict[str, Any]:
        return super().cursor() | {"carry_over": self.frontier}

    def state_dict(self, cursor: Mapping[str, Any]) -> dict[str, Any]:
        frontier: Frontier = cursor["carry_over"]
        samples = samples_of(frontier.groups)
        samples, _ = held_parts.collect(samples, [0] * len(samples), self._step.device.torch)
        return dict(cursor) | {"carry_over": frontier.state_dict(samples, held=dist.get_rank() == 0)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint.

        Carried samples that are longer than `rollout.max_response_tokens` are truncated; this happens if the
        saved run had a larger limit. Raises ConfigError if a prompt of a carried group has changed or is
        missing, or if `rollout.samples_per_prompt` has changed.
        """
        self._load_lengths(state)
        if "carry_over" not in state:  # the saved run had no carry-over
            self.frontier = Frontier(num_drawn=state.get("num_drawn", 0))
            return
        by_index = {prompt.index: prompt for prompt in self._prompts}
        try:
            prompt_of = lambda index, draw: replace(by_index[index], draw=draw)  # noqa: E731
            frontier = Frontier.from_state(state["carry_over"], prompt_of)
        except KeyError as error:
            raise ConfigError(
                f"the checkpoint holds unfinished samples of prompt {error}, but data.train has no such "
                "prompt; resume with the data of the saved run."
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"the checkpoint holds samples of prompts that have changed: {error}; resume with the "
                "data.train, the chat template and the data.* keys of the saved run."
            ) from error
        restored = frontier.state_dict(samples_of(frontier.groups), held=False)
        check_restored("the checkpoint's carry_over", state["carry_over"], restored)
        n = self._config.rollout.samples_per_prompt
        if any(len({sample.number for sample in group.samples}) != n for group in frontier.groups):
            raise ConfigError(
                f"rollout.samples_per_prompt={n}, but the checkpoint holds unfinished groups of another "
                "size; resume with the value of the saved run."
            )
        limit = self._sampling.max_tokens
        groups = (self._dialogues.within(group, limit) for group in frontier.groups)
        groups = (replace(group, samples=tuple(self._loaded([*group.samples]))) for group in groups)
        self.frontier = replace(frontier, groups=tuple(groups))
