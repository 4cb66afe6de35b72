"""The link between the ranks that train and the ranks that generate: weights one way, samples the other.

Each role has its own default process group, so Megatron and vLLM work in it as in a job of its own. The link
spans all ranks of the job, with communicators of its own. Ranks of the link are the job's ranks.

    trainer                                        generator
    link.send_weights(version)   -- weights -----> link.receive_weights(version), between two engine steps
    log-prob pass, in which no weight changes
    link.wait_sent()   # before the update
    link.receive_samples()       <- "samples n" -- link.send_samples(key, samples), called by a leader

Weights travel by the plan of a refit (`rl.refit.plan`), from the trainer's parameters to the engine's. A
thread sends while the trainer computes. Samples travel to the first training rank, which broadcasts them.
"""

import contextlib
import datetime
import json
import pickle
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.models import architecture
from rl.models.placement import RolloutPlacement, TrainingPlacement, count_experts
from rl.refit.gather import RefitMismatch
from rl.refit.refit import WeightPlan, clear_padding, engine_parameters, plan_weights, training_parameters
from rl.refit.transfer import BytesMoved, compare, transfer
from rl.rollout.engine import RolloutEngine
from rl.rollout.turns import Sample
from rl.runtime.collectives import broadcast_object
from rl.runtime.device import Device
from rl.runtime.own_group import own_group
from rl.runtime.session import control_group
from rl.training.engine import TrainingEngine

UNLIMITED = datetime.timedelta(days=30)
"""Time limit of a message. The other side may be in any phase of a step; the phases' limits and the
heartbeats end a run whose other side is gone."""


class Delivery(NamedTuple):
    """Samples that a replica has sent."""

    key: Any
    """The sender's `key`."""
    source: int
    """Rank of the job that sent them."""
    samples: list[Sample]


class Link:
    """Communication between the two roles. The constructor and `plan_weights` are collective over the job.

    Args:
        store: the job's store; the link uses keys with a prefix and connections of its own.
        rank: this process's rank in the job.
        train, rollout: the job's ranks in the two roles, ascending; together all ranks of the job.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        train: tuple[int, ...],
        rollout: tuple[int, ...],
        device: Device,
    ):
        self.rank, self.train, self.rollout, self.device = rank, train, rollout, device
        self._store, self._thread_store = (_connection(store) for _ in range(2))
        size = len(train) + len(rollout)
        options: dict = dict(rank=rank, size=size, timeout=UNLIMITED)
        self._control = own_group(store, "link-control", device=None, **options)
        self._weights = own_group(store, "link-weights", device=device, **options)
        self._planned: WeightPlan | None = None
        self._check_every = 0
        self._trainer: TrainingEngine | None = None
        self._engine: RolloutEngine | None = None
        self._sending: Future[BytesMoved] | None = None
        self._num_refits = 0
        self._num_read = 0
        self._outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sender: Future[None] | None = None

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
        weights, grid, num_layers = architecture(hf).weights(hf), config.training, hf["num_hidden_layers"]
        planned = plan_weights(
            weights,
            TrainingPlacement(
                len(self.train),
                grid.tp,
                grid.pp,
                num_layers,
                ep=grid.ep,
                etp=grid.expert_tp,
                num_experts=count_experts(weights),
                ranks=self.train,
            ),
            RolloutPlacement(len(self.rollout), config.rollout.tp, num_layers, ranks=self.rollout),
            dtype=getattr(torch, config.model.dtype),
            weight_map=None if trainer is None else trainer.weight_map,
            engine=engine,
            buffer_mib=config.refit.buffer_mib,
            group=self._control,
        )
        if planned.fallback:
            names = ", ".join(weight.vllm for weight in planned.fallback[:4])
            raise ConfigError(
                f"vLLM holds {len(planned.fallback)} weights ({names}, ...) in another dtype or layout than "
                "the trainer. They need vLLM's own loader, which a refit between two roles does not support; "
                "omit the section roles."
            )
        self._planned = planned

    # Weights ----------------------------------------------------------------------------------------------

    def send_weights(self, version: int) -> None:
        """Begin to send the trainer's weights; return at once. Called by every training rank.

        The weights must not change and keep their memory until `wait_sent` has returned. The first training
        rank announces the version to the generators.
        """
        assert self._sending is None, "wait_sent() must come before the next send_weights()"
        assert self._planned is not None and self._trainer is not None, (
            "plan_weights(trainer=...) comes first"
        )
        planned, number = self._planned, self._num_refits
        self._num_refits += 1
        sources = training_parameters(self._trainer.weight_map, planned)
        self.device.synchronize()  # the thread's stream does not wait for the update's
        if self.rank == self.train[0]:
            self._store.set(f"weights {number}", str(version))

        def send() -> BytesMoved:
            with self._own_stream():
                # On CUDA a message occupies the GPU while it waits for its receiver.
                self._thread_store.wait([f"receivers {number}"], UNLIMITED)
                return self._move(planned, number, version, sources, {})[0]

        self._sending = _in_thread(send)

    def wait_sent(self) -> BytesMoved | None:
        """Wait until the weights have been sent; return this rank's bytes, None if none were being sent.

        Raises what the sending thread raised.
        """
        sending, self._sending = self._sending, None
        return None if sending is None else sending.result()

    def receive_weights(self, version: int) -> BytesMoved:
        """Write the announced weights into the engine, between two engine steps; return this rank's bytes.

        Called by every generating rank, for each version that the trainer sends, in order; all replicas take
        part in the transfer, which begins when the last has called. Sets the engine's `weights_version`.

        After the first refit and every `refit.check_every` versions both ends compare checksums; raises
        RefitMismatch on a rank whose weights differ, naming weights and ranks.
        """
        assert self._planned is not None and self._engine is not None, "plan_weights(engine=...) comes first"
        planned, engine, number = self._planned, self._engine, self._num_refits
        self._num_refits += 1
        announced = int(self._store.get(f"weights {number}"))
        assert announced == version, f"the trainer sends version {announced}, not {version}"
        destinations = engine_parameters(engine, planned)
        engine.device.synchronize()  # the engine may still be reading
        if self._store.add(f"num receivers {number}", 1) == len(self.rollout):
            self._store.set(f"receivers {number}", "")
        done, wrong = self._move(planned, number, version, {}, destinations)
        clear_padding(engine, planned.in_place, destinations)
        engine.weights_changed()
        engine.weights_version = version
        if wrong:
            texts = (f"{planned.in_place[i].hf[0]} differs from that of rank {source}" for i, source in wrong)
            raise RefitMismatch(
                f"after the refit of version {version} {len(wrong)} weights of rank {self.rank} differ: "
                + "; ".join(list(texts)[:8])
            )
        return done

    def _move(
        self,
        planned: WeightPlan,
        number: int,
        version: int,
        sources: dict[int, Tensor],
        destinations: dict[int, Tensor],
    ) -> tuple[BytesMoved, list[tuple[int, int]]]:
        """Carry out the plan; return the bytes and the result of the check, if this version is checked.

        number: of the refit. Collective over the job.
        """
        where, wrong = self.device.torch, []
        done = transfer(planned.plan, sources, destinations, where, self._weights)
        if number == 0 or (self._check_every and version % self._check_every == 0):
            wrong = compare(planned.plan, sources, destinations, where, self._weights)
        return done, wrong

    @contextlib.contextmanager
    def _own_stream(self):
        """Use a stream of this thread on CUDA, and wait for it at the end."""
        if not self.device.is_cuda:
            yield
            return
        torch.cuda.set_device(self.device.torch)  # the current device is that of a thread
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    # Samples ----------------------------------------------------------------------------------------------

    def send_samples(self, key: Any, samples: list[Sample]) -> None:
        """Send finished samples to all training ranks; return at once. Called by a replica's leader.

        key: identifies the samples, such as a group's number; any picklable value. Raises what the sending
        thread raised meanwhile.
        """
        if self._sender is None:
            self._sender = _in_thread(self._send_queued)
        self.check_threads()
        self._outgoing.put(pickle.dumps(Delivery(key, self.rank, samples)))

    def _send_queued(self) -> None:
        while True:
            content = torch.frombuffer(bytearray(self._outgoing.get()), dtype=torch.uint8)
            number = self._thread_store.add("num samples", 1) - 1
            self._thread_store.set(f"samples {number}", json.dumps([self.rank, len(content)]))
            self._control.send([content], self.train[0], 0).wait()

    def receive_samples(self, timeout_s: float = 0.0) -> list[Delivery]:
        """Return what has arrived since the last call, in order of arrival, identical on all training ranks.

        Collective over the training role. If nothing has arrived, waits at most `timeout_s` for the first.
        Raises what the thread that sends weights raised: without weights no sample would come.
        """
        self.check_threads()
        arrived: list[bytes] = []
        while self.rank == self.train[0] and self._wait(
            key := f"samples {self._num_read}", 0 if arrived else timeout_s
        ):
            source, num_bytes = json.loads(self._store.get(key))
            content = torch.empty(num_bytes, dtype=torch.uint8)
            self._control.recv([content], source, 0).wait()
            self._store.delete_key(key)
            self._num_read += 1
            arrived.append(content.numpy().tobytes())
        return [pickle.loads(content) for content in broadcast_object(arrived, group=control_group())]

    def check_threads(self) -> None:
        """Raise what a sending thread has raised. Not collective."""
        for thread in (self._sending, self._sender):
            if thread is not None and thread.done():
                thread.result()

    def _wait(self, key: str, timeout_s: float) -> bool:
        """Return whether the store has the key after at most `timeout_s`."""
        if timeout_s > 0:
            with contextlib.suppress(dist.DistStoreError):  # the time is over
                self._store.wait([key], datetime.timedelta(seconds=timeout_s))
        return self._store.check([key])


def _connection(store: dist.Store) -> dist.Store:
    """Return a connection of its own to the store, which no wait of another thread blocks."""
    return dist.PrefixStore("link", store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs


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
