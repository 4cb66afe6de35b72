"""The requests that vLLM computes: their arguments, and the results that vLLM returns."""

from copy import copy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.rollout.batches import SamplesDiffer
from rl.rollout.samples import Completion, Request, context_digest
from rl.rollout.sampling import PARAMETERS, Sampling, parameters_code
from rl.runtime import tracing

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from rl.rollout.engine import RolloutEngine


@dataclass
class EngineCall:
    """A request's arguments to vLLM. The parts of the engine may change them."""

    prompt: dict[str, Any]
    """vLLM's input: tokens, or tokens with images."""
    params: "SamplingParams"
    version: int
    """Version of the policy that samples the first tokens."""
    options: dict = field(default_factory=dict)
    """Further arguments of InputProcessor.process_inputs."""


def call_of(request: Request, sampling: Sampling, version: int) -> EngineCall:
    """Return the call of a request. version: version of the engine's weights."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    # vLLM compiles the grammar within add_request if the executor is external_launcher, so that all ranks
    # admit the request at the same step (vLLM #29996).
    grammar = StructuredOutputsParams(structural_tag=request.grammar) if request.grammar else None
    params = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=request.max_tokens,
        structured_outputs=grammar,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        extra_args={"seed": request.seed},  # for HashedSampler
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,
        # Stop strings are matched in text; otherwise the trainer decodes in batches.
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # each request has its own parameters
    )
    return EngineCall({**tokens_input(request.token_ids.tolist())}, params, version)


def seed_of_call(call: EngineCall) -> int:
    """Return the seed that the engine uses for a call."""
    if call.params.seed is not None:
        return call.params.seed
    assert call.params.extra_args is not None, "the request has no seed"
    return call.params.extra_args["seed"]


_parameters = attrgetter(*PARAMETERS)
"""Return the values of PARAMETERS in vLLM's SamplingParams."""
_common = attrgetter("max_tokens", "grammar", "first_version", "num_begun", "adapter")
"""Return the fields that requests for samples of one prompt have in common, except tokens and images."""


@dataclass
class Processed:
    """A request with the arguments that vLLM has checked and completed.

    This takes longer than the rest of accepting a request. Therefore further samples of the prompt get copies
    with their own id and seed, as vLLM itself copies a request for several samples.
    """

    request: Request
    sampling: Sampling
    call: EngineCall
    core_request: "EngineCoreRequest"
    asked: tuple
    """`_parameters` of the call before the parts of the engine changed them."""
    given: tuple
    """`_parameters` of the call before vLLM completed them."""

    def has_prompt_of(self, request: Request, sampling: Sampling) -> bool:
        """Return whether `request` differs from this request only in name and seed."""
        own = self.request
        return (
            own.images is None
            and request.images is None
            and _common(own) == _common(request)
            and np.array_equal(own.token_ids, request.token_ids)
            and self.sampling == sampling
        )

    def copied(self, request: Request) -> "Processed":
        """Return a copy for another sample of the prompt."""
        made = copy(self.core_request)
        params = made.sampling_params = copy(made.sampling_params)
        assert params is not None and params.extra_args is not None
        params.extra_args = params.extra_args | {"seed": request.seed}
        made.request_id, made.external_req_id = request.name, None
        return replace(self, request=request, call=replace(self.call, params=params), core_request=made)


@dataclass
class Live:
    """A request that runs."""

    internal_id: str
    """vLLM's id: the name and a random suffix."""
    spans: list[tuple[int, int]]
    """Pairs (number of a token, version of the policy that sampled this token and the next ones).

    For example, [(0, 3), (20, 4)]: version 3 sampled the first 20 tokens, and version 4 the later tokens.
    """
    seed: int
    sampling: int
    """`parameters_code` of the parameters that vLLM's scheduler has for the request."""
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (number of log-probs so far, new version), for `check_versions`."""

    def versions(self, num_tokens: int) -> np.ndarray:
        """Return the version of each of the request's tokens, int32 [num_tokens]."""
        versions = np.zeros(num_tokens, np.int32)
        for first, version in self.spans:
            versions[first:] = version
        return versions

    def check_versions(self, versions: np.ndarray) -> None:
        """Raise SamplesDiffer unless each token has the version that was noted after its log-prob's place."""
        starts, later = zip((0, self.spans[0][1]), *self.changes)
        expected = np.repeat(later, np.diff([*starts, len(versions)]))
        if not np.array_equal(versions, expected):
            token = int((versions != expected).argmax())
            raise SamplesDiffer(
                f"sample check: token {token} of a request has the version {versions[token]} of the weights, "
                f"but version {expected[token]} sampled it: a refit was noted at another token, or never."
            )


class Calls:
    """The requests that run in an engine, by name.

    All ranks of a replica call the methods with the same arguments, in the same order.
    """

    def __init__(self, engine: "RolloutEngine"):
        self._engine = engine
        self._vllm: Any = engine.llm.llm_engine  # its methods take and return unions of all kinds of requests
        client: Any = engine.llm.llm_engine.engine_core
        self._core = client.engine_core
        self._live: dict[str, Live] = {}
        self._last: Processed | None = None
        """The last request of this run, if the engine still has the same weights."""
        self._code: tuple[list, int] = ([], 0)
        """The last values of PARAMETERS, and their `parameters_code`."""

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Request, sampling: Sampling) -> None:
        """Give a request to vLLM."""
        engine, last = self._engine, self._last
        if last is not None and last.has_prompt_of(request, sampling):
            this = last.copied(request)
            for part in engine.parts:
                part.request(engine, request, this.call)
        else:
            this = self._process(request, sampling)
        self._last = this
        # As LLMEngine.add_request does after process_inputs.
        made, call = this.core_request, this.call
        self._vllm.input_processor.assign_request_id(made)
        self._vllm.output_processor.add_request(made, None)
        self._vllm.engine_core.add_request(made)
        internal_id = made.request_id
        received = _parameters(engine.scheduler.requests[internal_id].sampling_params)
        # A part may write the same distribution in another way, for example top_k as the whole vocabulary.
        values = [a if r == g else r for a, g, r in zip(this.asked, this.given, received)]
        if values != self._code[0]:
            self._code = values, parameters_code(dict(zip(PARAMETERS, values)))
        self._live[request.name] = Live(internal_id, [(0, call.version)], seed_of_call(call), self._code[1])
        if request.grammar and request.num_begun:  # vLLM's grammar begins with the request, not with the turn
            grammar = engine.scheduler.requests[internal_id].structured_output_request.grammar
            begun = request.token_ids[-request.num_begun :].tolist()
            assert grammar.accept_tokens(request.name, begun), f"{request.name}: its tokens break its grammar"

    def _process(self, request: Request, sampling: Sampling) -> Processed:
        """Let vLLM check and complete the arguments of a request."""
        engine, vllm = self._engine, self._vllm
        call = call_of(request, sampling, engine.weights_version)
        if engine.keeps_cache:
            first = request.first_version
            call.prompt["cache_salt"] = f"v{engine.weights_version if first is None else first}"
        asked = _parameters(call.params)
        for part in engine.parts:
            part.request(engine, request, call)
        given, tasks = _parameters(call.params), vllm.get_supported_tasks()
        made = vllm.input_processor.process_inputs(
            request.name, call.prompt, call.params, supported_tasks=tasks, **call.options
        )
        return Processed(request, sampling, call, made, asked, given)

    def step(self) -> list[tuple[str, Completion]]:
        """Run one engine step; return the requests that finished.

        With `rollout.async_scheduling` the returned requests finished in the previous step, and the step that
        this call starts is still in flight.
        """
        with tracing.span("engine step", requests=len(self)):
            outputs = self._vllm.step()
        return [(done.request_id, self._completion(done)) for done in outputs if done.finished]

    def drain(self) -> list[tuple[str, Completion]]:
        """Process the steps that are in flight, without starting another; return the finished requests."""
        finished: list[tuple[str, Completion]] = []
        if self._core.batch_queue:
            scheduler = self._core.scheduler
            scheduler.has_requests = lambda: False  # vLLM's step then only takes the oldest output
            while self._core.batch_queue:
                finished += self.step()
            del scheduler.has_requests
        return finished

    def _completion(self, finished: "RequestOutput", logprobs: list[float] | None = None) -> Completion:
        """Return the tokens of a request that has ended, with the held columns.

        logprobs: of its tokens; None: the platform has them.
        """
        live, output = self._live.pop(finished.request_id), finished.outputs[0]
        if logprobs is None:
            logprobs = self._engine.platform.logprobs_of(self._engine, live.internal_id, output)
        held: dict[str, np.ndarray] = {}
        assert finished.prompt_token_ids is not None, "the engine is given tokens, not texts"
        for part in self._engine.parts if len(output.token_ids) else ():
            held |= part.completion(self._engine, live.internal_id, output)
        versions = live.versions(len(output.token_ids))
        live.check_versions(versions)
        return Completion(
            token_ids=np.asarray(output.token_ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            end=output.finish_reason if output.finish_reason in ("length", "abort") else "stop",
            weight_versions=versions,
            held=held,
            context_digest=context_digest(finished.prompt_token_ids),
            seed=live.seed,
            sampling=live.sampling,
        )

    def abort(self, name: str) -> Completion:
        """Abort a request and return its tokens so far, with the held columns."""
        from vllm.v1.engine import FinishReason

        engine, internal_id = self._engine, self._live[name].internal_id
        state = self._vllm.output_processor.request_states[internal_id]
        finished = state.make_request_output([], None, FinishReason.ABORT, None)
        # The CPU's scheduler reports tokens only at the end of a request.
        finished.outputs[0].token_ids = list(engine.scheduler.requests[internal_id].output_token_ids)
        logprobs = engine.platform.logprobs_so_far(engine, internal_id)
        self._vllm.abort_request([name])
        return self._completion(finished, logprobs)

    def abort_all(self) -> None:
        """Abort all requests and discard their tokens."""
        self._vllm.abort_request(list(self._live))
        self._live.clear()
        self._last = None

    def note_version(self, version: int) -> None:
        """Note that all further tokens are sampled by `version` of the policy."""
        self._engine.weights_version, self._last = version, None
        so_far = self._engine.platform.logprobs_so_far
        for live in self._live.values():  # for `Live.check_versions`
            live.changes.append((len(so_far(self._engine, live.internal_id)), version))
        for live in self._live.values():
            request = self._engine.scheduler.requests[live.internal_id]
            live.spans.append((request.num_output_tokens, version))
