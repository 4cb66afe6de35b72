"""Links the ranks that train with the ranks that generate: weights go one way, samples the other way.

Each role has a default process group of its own, so Megatron and vLLM work within the role as if it were a
whole job. The link spans all ranks of the job and has communicators of its own. The link numbers the ranks
as the job does.

    trainer                                        generator
    link.send_weights(version)   -- weights -----> link.receive_weights(version), between two engine steps
    log-prob pass: no weight changes
    link.wait_sent()   # before the update
    link.receive_samples()       <- samples ----- link.send_samples(key, samples), called by a leader

Weights are sent by the plan of a refit (`rl.refit.plan`), from the trainer's parameters to the engine's
parameters. A thread sends them while the trainer computes. Adapters that the engine keeps apart from the
base weights have a plan of their own, and the base weights are then sent only the first time. Samples are
sent to the first training rank, which broadcasts them. The values of held columns (`rl.data.held`) go
directly from the generator to one training rank; the training ranks take turns.
"""

import contextlib
import datetime
import functools
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl.config import wing
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.data import held
from rl.models import architecture
from rl.models.adapters import adapters
from rl.models.layout import Weight
from rl.models.placement import RolloutPlacement, TrainingPlacement, count_experts
from rl.refit.equality import differing
from rl.refit.gather import RefitMismatch
from rl.refit.refit import WeightPlan, clear_padding, engine_parameters, held_by, plan_weights
from rl.refit.transfer import BytesMoved, MessageForm, Sums, changed, compare, sent_checksums, transfer
from rl.refit.values import Values, values_of
from rl.rollout import held_parts
from rl.rollout.engine import RolloutEngine
from rl.rollout.samples import Sample, pack, unpack
from rl.runtime.collectives import broadcast_object, gather_objects
from rl.runtime.device import Device
from rl.runtime.job_store import JobStore
from rl.runtime.own_group import own_group
from rl.runtime.plain_data import decode, encode
from rl.runtime.session import control_group
from rl.training.engine import TrainingEngine

if TYPE_CHECKING:
    from rl.runtime.excluded_replicas import ExcludedReplicas

UNLIMITED = datetime.timedelta(days=30)
"""Time limit of a message. It is long, because the other side may be in any phase of a step. If the other
side is gone, the time limits of the phases and the heartbeats end the run."""
UNLIMITED_S = UNLIMITED.total_seconds()

SAMPLED = 13
"""Distance between two weights that are compared when samples are sent. Each version begins at another
weight: for example, version 15 compares weights 2, 15, 28 and so on. The number is a prime, because a divisor
of the number of weights per layer would select the same weights of every layer."""

PlannedTensors = tuple[WeightPlan, Mapping[int, Tensor], Mapping[int, Tensor]]
"""A plan, and the trainer's and the engine's tensors that take part in it, by the plan's indices."""

_SAMPLES = "samples"
"""Key of a queue in the store. An item of the queue announces samples: it holds the sender's rank, and the
sizes in bytes of the samples and of their held values."""
_HELD_TAG = 1
"""Tag of messages with held values; messages with samples have tag 0."""


class Delivery(NamedTuple):
    """Samples that a replica has sent."""

    key: Any
    """The `key` that the sender passed to `Link.send_samples`."""
    source: int
    """The sender's rank in the job."""
    samples: list[Sample]


class Link:
    """Carries weights and samples between the two roles.

    The constructor and `plan_weights` are collective over the job.

    Args:
        store: the job's store; the link uses keys with a prefix and connections of its own.
        torch_store: torch's store of the job, for the addresses of the link's groups.
        rank: this process's rank in the job.
        train, rollout: the job's ranks in the two roles, ascending. Together they are all ranks of the job.
        excluded: the replicas that the run goes on without; None if all replicas must live.
    """

    def __init__(
        self,
        store: JobStore,
        torch_store: dist.Store,
        *,
        rank: int,
        train: tuple[int, ...],
        rollout: tuple[int, ...],
        device: Device,
        excluded: "ExcludedReplicas | None" = None,
    ):
        self.rank, self.train, self.rollout, self.device = rank, train, rollout, device
        self.excluded = excluded
        self._torch_store = torch_store
        # Two connections, because a wait of one thread must not block the other thread.
        self._store, self._thread_store = (store.clone("link") for _ in range(2))
        size = len(train) + len(rollout)
        options: dict = dict(rank=rank, size=size, timeout=UNLIMITED)
        self._control = own_group(torch_store, "link-control", device=None, **options)
        self._weights = own_group(torch_store, "link-weights", device=device, **options)
        self._planned: list[WeightPlan] = []
        """The plan of the weights and, if adapters travel beside them, the plan of the adapters."""
        self._changes: list[MessageForm | None] = []
        """For each plan, the message form that sends only changed elements; None without
        `refit.changed_only`."""
        self._check_every = 0
        self._trainer: TrainingEngine | None = None
        self._engine: RolloutEngine | None = None
        self._excluded: tuple[int, ...] = ()
        """Replicas that are not in the communicator for weights."""
        self.leaders: tuple[int, ...] = ()
        """First ranks of the replicas that lived at the last `receive_samples`; identical on all trainers."""
        self._sending: Future[BytesMoved | None] | None = None
        self._connect_and_move: Callable[[], BytesMoved]
        self._num_refits = 0
        self._sums: list[Sums] = []
        """The trainers' checksums of some of the engine's weights, until `check_weights` compares them."""
        self._outgoing: queue.SimpleQueue[tuple[bytes, int, bytes]] = queue.SimpleQueue()
        self._num_sent = 0
        """Number of calls of `send_samples`."""
        self._sender: Future[None] | None = None
        self.held = held.ColumnBytes()
        """Bytes of held columns that this rank has received from generators, and that it expected."""

    def plan_weights(
        self,
        config: Config,
        hf: dict,
        *,
        trainer: TrainingEngine | None = None,
        engine: RolloutEngine | None = None,
    ) -> None:
        """Plan the refits of the policy. Collective over the job.

        A training rank passes `trainer`, a generating rank `engine`. hf: the policy's config.json. Raises
        ConfigError on every rank if an engine holds a weight in another form than the trainer.
        """
        self._trainer, self._engine, self._check_every = trainer, engine, config.refit.check_every
        self._tp = config.rollout.tp
        self._in_parts = len(_weights(config, hf)) > 1
        self.leaders = self.rollout[:: self._tp]
        self._plan = functools.partial(self._plan_for, config, hf)
        self._plan(self._control, self.rollout)

    def _plan_for(self, config: Config, hf: dict, group: dist.ProcessGroup, rollout: tuple[int, ...]) -> None:
        """Plan the refits from the training ranks to these generating ranks. Collective over the group.

        rollout: numbers of the generating ranks in the group.
        """
        grid, num_layers, parts = config.training, hf["num_hidden_layers"], _weights(config, hf)
        training = TrainingPlacement(
            len(self.train),
            grid.tp,
            grid.pp,
            num_layers,
            ep=grid.ep,
            etp=grid.expert_tp,
            num_experts=count_experts(parts[0]),
            ranks=self.train,
            vpp=grid.vpp,
        )
        maps = [None] * len(parts) if self._trainer is None else [v.weight_map for v in self._values()]
        held = [{}] * len(parts) if self._engine is None else held_by(self._engine)
        self._planned = [
            plan_weights(
                weights,
                training,
                RolloutPlacement(
                    len(rollout),
                    config.rollout.tp,
                    num_layers,
                    ranks=rollout,
                    ep=config.rollout.ep,
                    num_experts=training.num_experts,
                ),
                dtype=getattr(torch, config.model.dtype),
                weight_map=weight_map,
                engine=self._engine,
                held=tensors,
                buffer_mib=config.refit.buffer_mib,
                group=group,
            )
            for weights, weight_map, tensors in zip(parts, maps, held, strict=True)
        ]
        self._changes = [None] * len(parts)
        if messages := wing.door(config, "messages"):
            itemsize = getattr(torch, config.model.dtype).itemsize
            self._changes = [messages(itemsize) for _ in parts]
        if fallback := [weight.vllm for planned in self._planned for weight in planned.fallback]:
            raise ConfigError(
                f"vLLM holds {len(fallback)} weights ({', '.join(fallback[:4])}, ...) in another dtype or "
                "layout than the trainer. They need vLLM's own loader, which a refit between two roles does "
                "not support; omit the section roles."
            )

    def _values(self) -> list[Values]:
        """Return the values of the trainer's weights, and of its adapters if they travel beside them."""
        assert self._trainer is not None
        return values_of(self._trainer, in_parts=self._in_parts)

    # Weights ----------------------------------------------------------------------------------------------

    def send_weights(self, version: int) -> None:
        """Begin to send the trainer's weights; return at once. Called by every training rank.

        Until `wait_sent` has returned, the weights must neither change nor move to other memory. The first
        training rank announces the version to the generators.
        """
        assert self._sending is None, "wait_sent() must come before the next send_weights()"
        assert self._planned and self._trainer is not None, "plan_weights(trainer=...) comes first"
        number = self._num_refits
        self._num_refits += 1
        values = self._values()
        self.device.synchronize()  # the thread's stream does not wait for the stream of the update
        if self.rank == self.train[0]:
            self._store.set(f"weights {number}", str(version))

        def move() -> BytesMoved:
            pairs = zip(self._planned, values, strict=True)
            parts: list[PlannedTensors] = [
                (planned, own.by_number(planned.in_place), {}) for planned, own in pairs
            ]
            moved, *_ = self._move(number, version, parts)
            if self.excluded is not None:
                self.excluded.release()
            return moved

        def send() -> BytesMoved | None:
            # On CUDA a message occupies the GPU while it waits for its receiver.
            if self.rank == self.train[0]:
                self._await_receivers(number)
            if self._agreed(self._thread_store, number) != self._excluded:
                return None
            with self._own_stream():
                return move()

        def connect_and_move() -> BytesMoved:
            self._connect(self._agreed(self._store, number))
            return move()

        self._sending, self._connect_and_move = _in_thread(send), connect_and_move

    def wait_sent(self) -> BytesMoved | None:
        """Wait until the weights have been sent; return the bytes that this rank moved.

        Returns None if no weights were being sent. Raises the error of the sending thread, if any.
        """
        sending, self._sending = self._sending, None
        if sending is None:
            return None
        moved = sending.result()
        # After the death of a replica, the main thread connects the other ranks, because nothing else uses
        # the GPU in the meantime.
        return self._connect_and_move() if moved is None else moved

    def receive_weights(self, version: int) -> BytesMoved:
        """Write the announced weights into the engine, between two engine steps.

        Returns the bytes that this rank moved, and sets the engine's `weights_version`. Every generating rank
        calls it for each version that the trainer sends, in order. The transfer begins when the last replica
        has called.

        After the first refit, and at every version that is a multiple of `refit.check_every`, both ends
        compare checksums of all weights. A rank with wrong weights raises RefitMismatch, which names the
        weights and the ranks. With every version, the trainers also send checksums of some weights; these
        are for `check_weights`.
        """
        assert self._planned and self._engine is not None, "plan_weights(engine=...) comes first"
        self.check_weights()
        engine, number = self._engine, self._num_refits
        self._num_refits += 1
        key = f"weights {number}"
        self._store.wait([key], UNLIMITED_S)
        announced = int(self._store.get(key) or -1)
        assert announced == version, f"the trainer sends version {announced}, not {version}"
        engine.device.synchronize()  # the engine may still be reading
        self._store.set(f"receiver {number} {self.rank}", "")
        if (excluded := self._agreed(self._store, number)) != self._excluded:
            self._connect(excluded)
        parts: list[PlannedTensors] = [
            (planned, {}, engine_parameters(held, planned))
            for planned, held in zip(self._planned, held_by(engine), strict=True)
        ]
        done, wrong, sums = self._move(number, version, parts)
        for planned, _, destinations in parts:
            clear_padding(engine, planned.in_place, destinations)
        engine.weights_changed()
        engine.weights_version = version
        if engine.slots is not None:
            engine.slots.versions[0] = version
        if wrong:
            texts = (f"{weight.hf[0]} differs from {source}" for weight, source in wrong)
            raise RefitMismatch(
                f"after the refit of version {version} {len(wrong)} weights of rank {self.rank} differ: "
                + "; ".join(list(texts)[:8])
            )
        self._sums = sums
        return done

    def check_weights(self) -> None:
        """Raise RefitMismatch if the engine's weights differ from the checksums of the last refit.

        Call it once per version: on a leader before it sends the version's first samples, on other ranks
        before they take the next version. Not collective.
        """
        sums, self._sums = self._sums, []
        if not sums:
            return
        assert self._engine is not None
        engine, number = self._engine, len(sums)
        for planned, own, sent in zip(self._planned[-number:], held_by(engine)[-number:], sums, strict=True):
            if wrong := changed(sent, engine_parameters(own, planned)):
                weight, source = wrong[0]
                raise RefitMismatch(
                    f"rank {self.rank} acknowledged version {engine.weights_version}, but {len(wrong)} of "
                    f"{len(sent.regions)} compared parts of its weights are not what was sent, first that of "
                    f"{planned.in_place[weight].hf[0]} by rank {source}."
                )

    def _await_receivers(self, number: int) -> None:
        """Wait until all living replicas are between two engine steps, then announce the excluded replicas.

        Only the first training rank calls it. From the announcement until the weights have been sent, no
        further replica is left out.
        """
        store, keys = self._thread_store, [f"receiver {number} {rank}" for rank in self._ranks(())]

        def is_ready(excluded: tuple[int, ...]) -> bool:
            nonlocal keys
            keys = [f"receiver {number} {rank}" for rank in self._ranks(excluded)]
            return store.check(keys)

        def hold() -> tuple[int, ...] | None:
            if self.excluded is not None:
                return self.excluded.hold(is_ready)
            return () if is_ready(()) else None

        while (excluded := hold()) is None:
            store.wait(keys, 1)
        for key in keys:
            store.delete(key)
        store.set(f"receivers {number}", json.dumps(excluded))

    def _agreed(self, store: JobStore, number: int) -> tuple[int, ...]:
        """Wait for the announcement of `_await_receivers`; return the excluded replicas."""
        store.wait([key := f"receivers {number}"], UNLIMITED_S)
        return tuple(json.loads(store.get(key) or "[]"))

    def _ranks(self, excluded: tuple[int, ...]) -> tuple[int, ...]:
        return self.rollout if self.excluded is None else self.excluded.ranks(excluded)

    def _connect(self, excluded: tuple[int, ...]) -> None:
        """Connect the ranks that live, and plan their refits. Collective over the ranks that live.

        A new communicator is needed, because NCCL could wait for a dead rank forever without an error.
        """
        ranks = (*self.train, *self._ranks(excluded))
        if self.rank not in ranks:  # the watchdog ends this process
            raise ConnectionError("connection closed: this replica is left out of the run")
        name = "-".join(map(str, excluded))
        options: dict = dict(rank=ranks.index(self.rank), size=len(ranks), timeout=UNLIMITED)
        self._weights.abort()
        self._weights = own_group(self._torch_store, f"link-weights-{name}", device=self.device, **options)
        control = own_group(self._torch_store, f"link-plan-{name}", device=None, **options)
        self._plan(control, tuple(range(len(self.train), len(ranks))))
        dist.destroy_process_group(control)
        self._excluded = excluded

    def _move(
        self, number: int, version: int, parts: list[PlannedTensors]
    ) -> tuple[BytesMoved, list[tuple[Weight, str]], list[Sums]]:
        """Carry out the plans. Collective over the job, without excluded replicas.

        Returns the bytes that this rank moved; the wrong weights, each with the side that it differs from;
        and the checksums for `check_weights`.

        number: number of the refit, from 0. In later refits than the first, the base of adapters is not sent,
        but it is compared.
        """
        where, done, wrong, sums = self.device.torch, BytesMoved(), [], []
        moving = list(zip(parts, self._changes, strict=True))
        for (planned, sources, destinations), changes in moving if number == 0 else moving[-1:]:
            done += transfer(planned.plan, sources, destinations, where, self._weights, changes)
            every = SAMPLED if changes is None else 1  # `refit.changed_only` reads all weights anyway
            some = dict(every=every, first=version % every)
            sums.append(sent_checksums(planned.plan, sources, where, self._weights, **some))
        if number == 0 or (self._check_every and version % self._check_every == 0):
            for planned, sources, destinations in parts:
                found = compare(planned.plan, sources, destinations, where, self._weights)
                named = torch.zeros(len(planned.in_place), dtype=torch.int32, device=where)
                named[[number for number, _ in found]] = 1
                dist.all_reduce(named, group=self._weights)
                numbers = differing(planned.equality, sources, destinations, where, self._weights)
                wrong += [(planned.in_place[i], f"that of rank {source}") for i, source in found]
                wrong += [(planned.in_place[i], "the trainer's") for i in numbers if not named[i]]
        return done, wrong, sums

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On CUDA, use a stream of this thread, and wait for the stream at the end."""
        if not self.device.is_cuda:
            yield
            return
        torch.cuda.set_device(self.device.torch)  # each thread has its own current device
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    # Samples ----------------------------------------------------------------------------------------------

    def send_samples(self, key: Any, samples: list[Sample]) -> None:
        """Send finished samples to all training ranks; return at once. Called by a replica's leader.

        The values of held columns are sent to one training rank only; from call to call, the training ranks
        take turns. Raises the error of the sending thread, if any.

        key: plain data that identifies the samples, for example a group's number.
        """
        if self._sender is None:
            self._sender = _in_thread(self._send_queued)
        self.check_threads()
        self.check_weights()
        home = (self.rank + self._num_sent) % len(self.train)
        self._num_sent += 1
        values = b"".join(held_parts.content_of(segment) for s in samples for segment in s.segments)
        self._outgoing.put((encode([key, self.rank, home, pack(samples, held=False)]), home, values))

    def _send_queued(self) -> None:
        while True:
            samples, home, values = self._outgoing.get()
            # The announcement is one operation of the store. A replica that dies during it therefore leaves
            # no half announcement that the trainers would wait for.
            self._thread_store.push(_SAMPLES, json.dumps([self.rank, len(samples), len(values)]))
            for content, target, tag in ((samples, self.train[0], 0), (values, self.train[home], _HELD_TAG)):
                if content:
                    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                    self._control.send([tensor], target, tag).wait()

    def receive_samples(self, timeout_s: float = 0.0) -> list[Delivery]:
        """Return the deliveries since the last call, in order of arrival, identical on all training ranks.

        If nothing has arrived, this method waits at most `timeout_s` for the first delivery. It raises the
        error of the thread that sends weights, because without weights no sample would come. Collective over
        the training role.
        """
        self.check_threads()
        arrived: list[tuple[bytes, int]] = []
        if self.excluded is not None and self.rank == self.train[0]:
            self.leaders = self.excluded.ranks(self.excluded.numbers())[:: self._tp]
        while self.rank == self.train[0] and self._store.wait([_SAMPLES], 0 if arrived else timeout_s):
            source, num_bytes, num_held = json.loads(self._store.pop(_SAMPLES) or "")
            if (content := self._received(source, num_bytes, 0)) is not None:
                arrived.append((content, num_held))
        connects = self._sending is not None and self._sending.done() and self._sending.result() is None
        found = broadcast_object((self.leaders, arrived, connects), group=control_group())
        self.leaders, arrived, connects = found
        # The generators wait for this connection, and the awaited samples may wait for the generators.
        if connects:
            moved: Future = Future()
            moved.set_result(self.wait_sent())
            self._sending = moved
        deliveries = [self._delivery(content, num_held) for content, num_held in arrived]
        if self.excluded is None or not any(num_held for _, num_held in arrived):
            return [delivery for delivery in deliveries if delivery is not None]
        # A sender may have died after it sent the samples and before it sent their held values.
        arrive = gather_objects([delivery is not None for delivery in deliveries], control_group())
        return [
            found for found, everywhere in zip(deliveries, map(all, zip(*arrive))) if found and everywhere
        ]

    def _received(self, source: int, num_bytes: int, tag: int) -> bytes | None:
        """Return a message; None if its sender has died and the run continues without it."""
        content = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            self._control.recv([content], source, tag).wait()
        except RuntimeError:
            if self.excluded is None:
                raise
            return None
        return content.numpy().tobytes()

    def _delivery(self, content: bytes, num_held: int) -> Delivery | None:
        """Return the delivery of a message, with its held values if this rank is their home.

        num_held: size of the values, as the sender announced it. Returns None if the sender has died.
        """
        key, source, home, packed = decode(content)
        samples = held_parts.only_on(unpack(packed), home)
        if not num_held or self.train[home] != self.rank:
            return Delivery(key, source, samples)
        if (values := self._received(source, num_held, _HELD_TAG)) is None:
            return None
        planned = sum(held_parts.num_bytes(segment) for sample in samples for segment in sample.segments)
        moved = held.ColumnBytes(len(values), planned)
        self.held += moved.checked(f"the message of rank {source} with the samples {key}")
        return Delivery(key, source, held_parts.unpacked(samples, values, home))

    def check_threads(self) -> None:
        """Raise the error of a sending thread, if any. Not collective."""
        for thread in (self._sending, self._sender):
            if thread is not None and thread.done():
                thread.result()


def _weights(config: Config, hf: dict) -> list[list[Weight]]:
    """Return lists of the weights that are sent: the model's and, if they are sent apart, the adapters'."""
    weights, adapter = architecture(hf).weights(hf), config.adapter
    if not adapter.is_on or adapter.in_engine == "merged":
        return [weights]
    pairs = adapters(weights, rank=adapter.rank, targets=adapter.targets)
    return [weights, [weight for pair in pairs for weight in pair.weights]]


def _in_thread(function: Callable[[], Any]) -> Future:
    """Run the function in a thread that does not keep the process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="link", daemon=True).start()
    return future
