"""The ranks that only generate, while other ranks of the run train (section `roles` of the config)."""

import datetime
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace

import torch.distributed as dist

from rl.config.role_checks import role_ranks
from rl.config.schema import Config
from rl.data.prompts import Prompt
from rl.engines.inputs import Inputs
from rl.engines.rollout_engines import build_rollout
from rl.faults.fault_board import Disagreement
from rl.faults.watchdog import Watchdog
from rl.features.roles.link import Link
from rl.features.roles.messages import MESSAGE_TYPES, Begin, Generate, TrainerMessages
from rl.features.roles.stream_schedule import WAIT_S, Batches, StreamSchedule
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling, train_sampling
from rl.rollout.source import Dialogue, SampleSource
from rl.run.samplers import DialogueForm
from rl.runtime import session, tracing
from rl.runtime.collectives import broadcast_object, gather_objects
from rl.runtime.device import Device
from rl.runtime.group_warm_up import limit_collectives, warm_up
from rl.stopping.requests import StopRequests

ENDLESS = 1 << 62
"""Number of groups in the queue of a generator, whose stream of groups has no end."""


def enter_role(config: Config, device: Device, watchdog: Watchdog) -> Link:
    """Make the ranks of this rank's role its default process group; return the link to the other role.

    Collective over the job.
    """
    ranks = dict(zip(("train", "rollout"), role_ranks(config, dist.get_world_size())))
    rank = dist.get_rank()
    name = next(name for name, members in ranks.items() if rank in members)
    timeout = datetime.timedelta(seconds=config.watchdog.limits.start_up)
    session.enter_role(name, ranks[name], device, timeout)
    replica = dist.get_rank() // config.rollout.tp
    watchdog.tracker.role = name if name == "train" else f"{name} {replica}"
    if tracing.control is not None:
        tracing.control.role = watchdog.tracker.role
    store, excluded = session.job().store, None
    if config.roles.min_replicas:
        from rl.runtime.excluded_replicas import ExcludedReplicas

        rollout, tp = ranks["rollout"], config.rollout.tp
        replicas = [range(first, first + tp) for first in rollout[::tp]]
        excluded = ExcludedReplicas(store, replicas, minimum=config.roles.min_replicas)
        watchdog.excluded = excluded
    members = {name: tuple(ranks) for name, ranks in ranks.items()}
    return Link(store, session.job().torch_store, rank=rank, device=device, excluded=excluded, **members)


class Generators:
    """Generates, on one rank, the samples that the trainers ask for. Methods are collective over the replica.

    The replica's leader reads the trainers' messages. `StreamSchedule` describes the order in which the
    replica generates.

    Args:
        dialogue_form: makes the dialogues, and the recorder that stores the events of the stream.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        device: Device,
        watchdog: Watchdog,
        link: Link,
        stop: StopRequests,
        dialogue_form: DialogueForm,
    ):
        self._config, self._inputs, self._link, self._stop = config, inputs, link, stop
        self._dialogue_form = dialogue_form
        in_waves = config.agents.is_on and config.agents.order == "waves"
        self._has_fixed_share = in_waves and not config.roles.min_replicas
        """Whether each replica has a fixed share of the groups. It is false with roles.min_replicas, because
        nobody would generate the share of a dead replica."""
        self._device, self._tracker = device, watchdog.tracker
        self._messages = TrainerMessages(session.job().store)
        self._prompt_order = inputs.prompt_order()
        self._step = 0
        self._next_look = 0.0
        self._waits_for = ""
        """Why the engine takes no step: "weights", or a text about the awaited environments. The text is
        empty while the engine does not wait."""
        self._exit_code: int | None = None
        warm_up(device)

    def run(self) -> int:
        """Build the engine, then generate until the run ends; return the run's exit code.

        Collective over the role.
        """
        self._engine = engine = build_rollout(self._config, self._device)
        engine.keeps_cache = self._config.roles.cache == "keep"
        self._link.plan_weights(self._config, self._inputs.models["policy"].hf, engine=engine)
        limit_collectives(self._config.watchdog.limits)
        queue = engine.queue(ENDLESS, is_fixed=self._has_fixed_share)
        stream, source, sampling, options = None, None, train_sampling(self._config), {}
        if self._link.excluded is not None:
            from rl.features.roles.claims import Claims

            queue = claims = Claims(session.job().store, self._link.excluded, engine.replica)
            options["take_over"] = claims.abandoned
        if engine.leads:
            begin, dialogue = self._first_message(), self._dialogue(sampling, self._window())
            stream = StreamSchedule(
                self._config,
                begin,
                draw=self._draw,
                queue=queue,
                messages=self._messages,
                send=lambda group, prompt, samples: self._send((group, prompt), samples, dialogue),
                **options,
            )
            source = SampleSource(stream, dialogue)
        while True:
            recorder = None
            if source is not None:
                recorder = self._dialogue_form.recorder(source, engine, sampling)
            is_whole = engine.run(
                recorder or source,
                sampling,
                interrupt=self._look,
                take_weights=self._take_weights,
                on_wait=self._note_wait,
                keep_records=False,  # one run of the engine may last as long as the job
            )
            self._compare_logs()
            if not is_whole:  # the leader has read the exit code, so the run ends
                engine.close()
                code = self._messages.exit_code()
                assert code is not None
                return code
            if recorder is not None:
                recorder.finish()
            barrier = None if stream is None else stream.barrier
            taken = broadcast_object(barrier, group=engine.replica_group, types=MESSAGE_TYPES)
            assert taken is not None
            engine.llm.reset_prefix_cache()  # a run that resumes here would also begin with an empty cache
            name, message = taken
            if isinstance(message, Generate):
                self._answer(name, message)
            if stream is not None:
                stream.barrier = None

    def _first_message(self) -> Begin:
        while (taken := self._messages.take(WAIT_S)) is None:
            self._look()
        begin = taken[1]
        assert isinstance(begin, Begin)
        self._prompt_order.load_state_dict(begin.cursor)
        return begin

    def _window(self) -> int:
        """Return the number of groups that all replicas together may hold at a time."""
        roles = self._config.roles
        return Batches.of_config(self._config).size * (1 if roles.granularity == "batch" else roles.lag + 1)

    def _draw(self, number: int) -> list[Prompt]:
        return [self._inputs.prompts[i] for i in self._prompt_order.draw(number)]

    def _answer(self, name: str, message: Generate) -> None:
        """Generate the responses to the prompts of a message, and send them."""
        engine, self._step, sampling = self._engine, message.step, message.sampling
        self._take_weights(message.version)
        queue = engine.queue(len(message.prompts), is_fixed=self._has_fixed_share)
        schedule = QueueSchedule(message.prompts, sampling, message.seeds, queue=queue)
        if engine.leads:
            dialogue = self._dialogue(sampling, len(message.prompts), keeps_failed=message.keeps_failed)
            source = SampleSource(schedule, dialogue)
            if engine.run(source, sampling, interrupt=self._look, on_wait=self._note_wait):
                self._send(name, schedule.samples, dialogue)
        else:
            engine.run(None, sampling, interrupt=self._look, on_wait=self._note_wait)
        self._compare_logs()

    def _dialogue(self, sampling: Sampling, num_prompts: int, *, keeps_failed: bool = False) -> Dialogue:
        """Return the dialogue for one run of the engine.

        num_prompts: number of prompts that all replicas together may hold at a time.
        """
        capacity = self._engine.capacity(num_prompts, sampling.samples_per_prompt)
        return self._dialogue_form.dialogue(sampling, capacity=capacity, keeps_failed=keeps_failed)

    def _send(self, key: Hashable, samples: list[Sample], dialogue: Dialogue) -> None:
        """Send samples to the trainers, with the dialogue's counts since the last call."""
        # Only a reward model or a judge reads the conversations.
        if not (self._config.reward.model.path or self._config.reward.judge.path):
            samples = [replace(sample, conversation=None) for sample in samples]
        counts, dialogue.counts = dict(dialogue.counts), Counter()
        self._link.send_samples((key, counts), samples)

    def _take_weights(self, version: int) -> None:
        """Receive the weights of this version, unless the engine has them already.

        In both cases the rank enters the phase `generate` again, so the time limit of this phase restarts.
        """
        self._step = version + 1
        tracing.begin_step(self._step)
        if self._engine.weights_version != version:
            self._tracker.enter("refit", self._step)
            self._link.receive_weights(version)
        self._tracker.enter("generate", self._step)

    def _look(self) -> bool:
        """Share this rank's stop request, and enter the phase that fits; return whether the run ends.

        The phase is `generate` while the engine has requests and does not wait, otherwise `wait_weights`. A
        stop request does not end this rank directly. The trainers decide on a stop, and end the generators
        (`TrainerMessages.end`).
        """
        self._stop.is_requested()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + WAIT_S
            self._link.check_threads()
            self._exit_code = self._messages.exit_code()
        phase = "generate" if self._engine.is_busy and not self._waits_for else "wait_weights"
        if self._tracker.current.phase not in (phase, "environments"):
            self._tracker.enter(phase, self._step)
        return self._exit_code is not None

    def _note_wait(self, text: str) -> None:
        self._waits_for = text
        if text and text != "weights" or self._tracker.current.phase == "environments":
            self._tracker.wait("" if text == "weights" else text)

    def _compare_logs(self) -> None:
        """Raise Disagreement if ranks of the replica generated different tokens."""
        digests = gather_objects(self._engine.events.digest, self._engine.replica_group)
        if len(set(digests)) > 1:
            raise Disagreement(f"the ranks of replica {self._engine.replica} generated different tokens")
