"""The trainers' side of a run with roles: a sampler whose samples come from other ranks."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl.checks.batches import StaleTokens, check_staleness
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.data.batch import Batch, fingerprint
from rl.data.held import ColumnBytes
from rl.data.prompts import Prompt
from rl.engines.memory import MemorySharing
from rl.faults.fault_board import Disagreement
from rl.features.roles.link import Delivery, Link
from rl.features.roles.messages import Begin, Complete, Generate, NextBatch, TrainerMessage, TrainerMessages
from rl.features.roles.stream_schedule import Batches
from rl.phases.dialogues import Dialogues
from rl.phases.sampler import SampleCall, Sampler
from rl.phases.step_record import StepRecord
from rl.rollout import held_parts
from rl.rollout.samples import Sample, pack, unpack
from rl.rollout.sampling import train_sampling
from rl.run_directory import progress as bars
from rl.run_directory.consumed import ConsumedLog
from rl.runtime.collectives import any_rank
from rl.runtime.session import job
from rl.stopping.requests import StepAborted, StopRequests
from rl.training.engine import TrainingEngine

WAIT_S = 1.0
"""Time between two checks for a stop request while the trainers wait for samples, in seconds."""

Interrupt = Callable[[], bool] | None
"""Returns whether a stop was requested; None if the call cannot be aborted."""


class GenerationByRoles(Sampler):
    """Asks the generators for samples, and sends them the weights. Methods are collective over the trainers.

    The trainers consume whole batches in order, so each group is consumed exactly once. A checkpoint holds
    the number of the next batch, and the groups of this and later batches that have arrived.

    Args:
        stop: requests that may abort the wait for a batch; None if no request may.
        dialogues: makes batches of the samples.
    """

    varies_limits = True

    def __init__(
        self,
        config: Config,
        step: StepRecord,
        policy: TrainingEngine,
        memory: MemorySharing,
        stop: StopRequests | None,
        *,
        link: Link,
        dialogues: Dialogues,
    ):
        super().__init__(config, step, policy)
        self._dialogues = dialogues
        self._stop = stop
        self._link, self._messages = link, TrainerMessages(job().store)
        self._sampling, self._batches = train_sampling(config), Batches.of_config(config)
        memory.wait_for_readers = self._wait_for_readers
        self._next_batch = 0
        self._num_learned = 0
        """Number of the first batch that the policy has not learned from."""
        self._num_asked = 0
        """Number of batches that the generators may begin."""
        self._groups: dict[int, Delivery] = {}
        """Groups that have arrived and that the policy has not learned from, by number.

        The key of a delivery is a pair. For a group, its first part is the group's number with the
        fingerprint of its prompt; for an answer to a `Generate`, it is the message's name. The second part is
        the sums of `Dialogue.counts` since the previous delivery."""
        self._taken: list[tuple[int, int]] = []
        """(number of the group, index of its prompt) for each group that this step has taken."""
        self._consumed_log = ConsumedLog(config.run.dir)
        self._answers: dict[str, dict[int, Delivery]] = {}
        """Answers to each `Generate` that is still awaited: name of the message -> rank of the replica's
        leader -> answer."""
        self._claims = None
        self._first = 0
        """Number of the first group of this start."""
        self._kept = 0
        """Number of the first claim that is still in the store."""
        if link.excluded is not None:
            from rl.features.roles.claims import Claims

            self._claims = Claims(job().store, link.excluded)
        self._sent_version: int | None = None

    # The run ----------------------------------------------------------------------------------------------

    def begin(self, cursor: Mapping[str, Any]) -> None:
        """Start the generators."""
        self._first = self._batches.first(self._num_learned)
        self._send(Begin(cursor["sampler"], self._num_learned, frozenset(self._groups)))

    def end(self, code: int) -> None:
        """End the generators; they drop unfinished samples. code: exit code of the run."""
        if dist.get_rank() == 0:
            self._messages.end(code)

    def check(self, batch: Batch) -> None:
        """Log the staleness of the batch, and the bytes of its held columns.

        Raises StaleTokens if a token is older than `roles.lag` allows.
        """
        self._step.metrics |= check_staleness(batch, self._policy.version, self._config.roles.lag)
        self._log_held(batch, self._link.held)
        self._link.held = ColumnBytes()

    def learned(self) -> None:
        """Note that the algorithm has learned from the batches of this step.

        Rank 0 writes the step's groups to `consumed.jsonl`, too.
        """
        before = self._batches.first(self._num_learned)
        self._num_learned = self._next_batch
        first = self._batches.first(self._num_learned)
        if dist.get_rank() == 0:
            if self._claims is not None:
                # Keep the claims of this step's batches, because a replica may still search in them.
                self._claims.forget(range(self._kept, before - self._first))
                self._kept = before - self._first
            self._step.fence()
            parts = dict(consumed=self._taken, dropped=[], waiting=[])
            self._consumed_log.append(self._step.number, num_drawn=first, **parts)
        self._taken = []
        self._groups = {group: found for group, found in self._groups.items() if group >= first}

    def before_save(self) -> None:
        """Wait for all groups that the generators may have begun, so that a checkpoint holds them.

        Without the wait, a resumed run would generate these groups again, with newer weights. It waits only
        with rollout.deterministic=true or run.on_stop_in_generation=finish.
        """
        if self._config.rollout.deterministic or self._config.run.on_stop_in_generation == "finish":
            groups = range(self._batches.first(self._num_learned), self._batches.first(self._num_asked))
            self._send(Complete())
            with self._step.phase("wait_samples", timing="save_checkpoint"):
                self._receive(lambda: all(group in self._groups for group in groups))

    def state_dict(self, cursor: Mapping[str, Any]) -> dict[str, Any]:
        return dict(cursor) | {"roles": self._stream_state()}

    def _stream_state(self) -> dict[str, Any]:
        deliveries = [self._groups[group] for group in sorted(self._groups)]
        samples = [sample for delivery in deliveries for sample in delivery.samples]
        samples, _ = held_parts.collect(samples, [0] * len(samples), self._step.device.torch)
        return {
            "batch": self._num_learned,
            "batch_size": self._batches.size,
            "samples_per_prompt": self._sampling.samples_per_prompt,
            "groups": [[each.key, each.source, len(each.samples)] for each in deliveries],
            "samples": pack(samples, held=dist.get_rank() == 0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Groups that would be too old by the time of their batch are dropped.

        Raises ConfigError if batches or groups have another size than in the saved run.
        """
        super().load_state_dict(state)
        if "roles" not in state:  # the saved run had no roles
            self._next_batch = self._num_learned = self._num_asked = state["step"]
            return
        state = state["roles"]
        if state["batch_size"] != self._batches.size:
            raise ConfigError(
                f"batches have {self._batches.size} prompts (data.prompts_per_step, or with dynamic sampling "
                "dynamic_sampling.prompts_per_round), but the checkpoint counts batches of "
                f"{state['batch_size']}; resume with the value of the saved run."
            )
        self._next_batch = self._num_learned = self._num_asked = state["batch"]
        samples = iter(self._loaded(unpack(state["samples"])))
        n = self._sampling.samples_per_prompt
        if state["groups"] and state["samples_per_prompt"] != n:
            raise ConfigError(
                f"rollout.samples_per_prompt={n}, but the checkpoint holds groups of "
                f"{state['samples_per_prompt']} samples; resume with the value of the saved run."
            )
        for key, source, number in state["groups"]:
            (group, _), _ = key
            own = [next(samples) for _ in range(number)]
            version = self._policy.version + self._batches.of(group) - self._num_learned
            if _oldest(own) >= version - self._config.roles.lag:
                self._groups[group] = Delivery(key, source, own)

    # Generation -------------------------------------------------------------------------------------------

    def refit(self) -> None:
        """Begin to send the policy's weights, if the last weights sent are of another version."""
        if self._sent_version != self._policy.version:
            self._sent_version = self._policy.version
            self._link.send_weights(self._policy.version)

    def batch(self, prompts: list[Prompt], *, round: int = 0) -> Batch:
        """Return the next batch of the stream.

        prompts: the prompts that the trainers drew; the generators draw the same prompts for this batch.
        """
        groups = self._batches.groups(self._next_batch)
        if len(prompts) != len(groups):
            raise ValueError(
                f"algorithm={self._config.algorithm} generates for {len(prompts)} prompts at once, but "
                f"with roles it must be the {len(groups)} of draw_prompts()."
            )
        self.refit()  # sends weights only if this step has already updated the policy
        step, number = self._step, self._next_batch
        later = min(self._config.roles.lag, self._config.run.max_steps - step.number)
        self._num_asked = number + later + 1
        call = SampleCall(prompts, self._sampling, self._purpose(round))
        self._send(NextBatch(step.number, self._policy.version, number, self._num_asked, call.purpose))

        def receive(bar: bars.Counter, interrupt: Interrupt) -> list[Delivery]:
            self._receive(lambda: all(group in self._groups for group in groups), bar, interrupt)
            self._check_groups(groups, call.ids)
            self._next_batch += 1
            self._taken += [(group, prompt.index) for group, prompt in zip(groups, prompts)]
            return [self._groups[group] for group in groups]

        return self._awaited(receive, call)

    def sample(self, call: SampleCall) -> Batch:
        self.refit()  # as in `batch`
        version, prompts = self._policy.version, call.prompts
        seeds, keeps_failed = self._seeds(call), call.timing == "testing"

        def receive(bar: bars.Counter, interrupt: Interrupt) -> list[Delivery]:
            found: list[Delivery] = []
            places = list(range(len(prompts)))
            while places:  # repeated only if a replica has died
                own = [self._dialogues.sent(prompts[place]) for place in places]
                own_seeds = [seeds[place] for place in places]
                message = Generate(self._step.number, version, own, call.sampling, own_seeds, keeps_failed)
                for answer in self._generate(message, bar, interrupt):
                    samples = [replace(s, prompt=places[s.prompt]) for s in answer.samples]
                    found.append(answer._replace(samples=samples))
                places = sorted({*places} - {s.prompt for answer in found for s in answer.samples})
            return found

        return self._awaited(receive, call)

    def _generate(self, message: Generate, bar: bars.Counter, interrupt: Interrupt) -> list[Delivery]:
        """Ask all replicas for samples; return the answers of the replicas that live."""
        name = self._send(message)
        answers = self._answers[name] = {}
        self._receive(lambda: answers.keys() >= {*self._link.leaders}, bar, interrupt)
        del self._answers[name]
        if dist.get_rank() == 0:
            self._messages.remove(name)
        return list(answers.values())

    def _awaited(
        self, receive: Callable[[bars.Counter, Interrupt], list[Delivery]], call: SampleCall
    ) -> Batch:
        """Return the samples of `receive` as a batch, and log how long the trainers waited for them."""
        awaited = self._call("wait_samples", call.ids, call.num_samples, call.timing, self._stop)
        with awaited as (bar, interrupt):
            found = receive(bar, interrupt)
        counts = sum((Counter(delivery.key[1]) for delivery in found), Counter[str]())
        samples = [sample for delivery in found for sample in delivery.samples]
        return self._dialogues.batch(samples, call, counts=counts)

    def _receive(
        self, done: Callable[[], bool], bar: bars.Counter | None = None, interrupt: Interrupt = None
    ) -> None:
        """Take deliveries from the generators until `done()` is true.

        Raises StepAborted if `interrupt` reports a stop request on any rank.
        """
        while not done():
            for delivery in self._link.receive_samples(WAIT_S):
                if not self._keep(delivery):
                    continue
                if bar is not None:
                    bar.update(len(delivery.samples))
            if interrupt is not None and any_rank(interrupt()):
                raise StepAborted

    def _keep(self, delivery: Delivery) -> bool:
        """Keep a delivery; return False if it is not needed.

        A delivery is not needed if another replica, which took over the work, has delivered it already. This
        happens if the first replica seemed to have died.
        """
        key, _ = delivery.key
        if isinstance(key, str):
            if key in self._answers:
                self._answers[key][delivery.source] = delivery
            return key in self._answers
        group = key[0]
        is_known = group in self._groups or group < self._batches.first(self._num_learned)
        if is_known:
            assert self._claims is not None, f"group {group} was generated twice"
            return False
        self._groups[group] = delivery
        if self._claims is not None and dist.get_rank() == 0:
            self._claims.note_done(group - self._first)
        return True

    def _check_groups(self, groups: range, ids: list[np.ndarray]) -> None:
        """Check that each group has the trainers' prompt, and that no token is too old.

        Raises Disagreement if a group has another prompt than the trainers drew. Raises StaleTokens if a
        token is older than `roles.lag` allows.
        """
        version, lag = self._policy.version, self._config.roles.lag
        for group, prompt in zip(groups, ids):
            ((_, own), _), rank, samples = self._groups[group]
            if own != fingerprint([prompt]):
                raise Disagreement(
                    f"rank {rank} generated group {group} from another prompt than the trainers drew"
                )
            oldest = _oldest(samples)
            if oldest < version - lag:
                number, token = next(
                    (s.number, int((s.weight_versions == oldest).argmax()))
                    for s in samples
                    if (s.weight_versions == oldest).any()
                )
                raise StaleTokens(
                    f"token {token} of sample {number} of group {group} was sampled by version {oldest} of "
                    f"the weights on the replica of rank {rank}, but version {version} is to learn from it, "
                    f"and roles.lag={lag}. This is a bug of the scheduler; please report it."
                )

    # Messages and weights ---------------------------------------------------------------------------------

    def _send(self, message: TrainerMessage) -> str:
        return self._messages.put(message) if dist.get_rank() == 0 else self._messages.skip()

    def _wait_for_readers(self) -> None:
        """Wait until every generator has the weights. Afterwards the trainer may change them."""
        with self._step.phase("wait_weights", timing="update_weights"):
            moved = self._link.wait_sent()
        if moved is not None:
            sent = torch.tensor([moved.sent, moved.unabridged])
            dist.all_reduce(sent)
            self._step.metrics["perf/refit_bytes_received"] = int(sent[0])
            if sent[1]:
                self._step.metrics["perf/refit_bytes_unabridged"] = int(sent[1])


def _oldest(samples: list[Sample]) -> int:
    """Return the oldest version of the weights that sampled a token of these samples.

    Returns sys.maxsize if the samples have no tokens.
    """
    return min((int(s.weight_versions.min()) for s in samples if len(s.token_ids)), default=sys.maxsize)
