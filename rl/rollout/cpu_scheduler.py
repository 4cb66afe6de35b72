"""vLLM's scheduler with a short path for steps that decode one token of every request.

Scheduling and its bookkeeping cost vLLM about 60 us of Python per token, which is most of the time of a small
model's step. A step without prompts needs little of this work: no request is admitted, and a request needs a
new block of the KV cache only if its last block is full. vLLM's public option `scheduler_cls` selects it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class CpuScheduler(Scheduler):
    """vLLM's scheduler, with two attributes that other parts of the CPU engine read and set."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logprobs: dict[str, list[float]] = {}
        """Log-probs of the tokens of requests, by vLLM's internal id, if vLLM's outputs do not have them."""
        self.before_free: Callable[[Request], None] | None = None
        """Called with each request before its blocks of the KV cache are freed: when it has finished, is
        aborted or preempted."""

    def _free_request_blocks(self, request: Request) -> None:
        if self.before_free is not None:
            self.before_free(request)
        super()._free_request_blocks(request)


class DecodeScheduler(CpuScheduler, AsyncScheduler):
    """Makes exactly the schedule that vLLM's scheduler makes, without speculation or pipeline stages.

    With a connector (`rollout.kv_offload_gib`), vLLM's own code makes the schedule.

    A step may be scheduled before the previous step's tokens are known. A request then has placeholders for
    these tokens (`num_output_placeholders`). A request without stop strings yields a single output at its
    end. For another version of vLLM, compare `_schedule_decoding` with the loop over `running` in
    Scheduler.schedule, and `update_from_output` with Scheduler's and AsyncScheduler's.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert not (self.num_spec_tokens or self.use_pp or self.log_stats)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        return self._schedule_decoding() or super().schedule(throttle_prefills)

    def _schedule_decoding(self) -> SchedulerOutput | None:
        """Return a plan that decodes one token of each running request, or None if there is more to do."""
        running = [request for request in self.running if not self._awaits_last(request)]
        starts = [request.num_computed_tokens for request in running]
        full = [request for request, start in zip(running, starts) if start % self.block_size == 0]
        if (
            not running
            or self.waiting
            or self.connector is not None
            or len(running) > self.max_num_scheduled_tokens
            or len(full) > self.kv_cache_manager.block_pool.get_num_free_blocks()
            or any(r.num_tokens + r.num_output_placeholders != n + 1 for r, n in zip(running, starts))
            or any(request.request_id not in self.prev_step_scheduled_req_ids for request in running)
        ):
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        blocks: dict[str, tuple[list[int], ...]] = {}
        for request in full:
            allocated = self.kv_cache_manager.allocate_slots(request, 1)
            assert allocated is not None, "there are enough free blocks"
            blocks[request.request_id] = allocated.get_block_ids()
        names = [request.request_id for request in running]
        num_output_tokens = [r.num_output_tokens + r.num_output_placeholders for r in running]
        bound = [request for request in running if request.use_structured_output]
        awaits_grammar = any(request.num_output_placeholders for request in bound)
        for request in running:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        self.prev_step_scheduled_req_ids.clear()
        self.prev_step_scheduled_req_ids.update(names)
        finished, self.finished_req_ids = self.finished_req_ids, set()
        preempted, self.reset_preempted_req_ids = self.reset_preempted_req_ids, set()
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[blocks.get(name) for name in names],
                num_computed_tokens=starts,
                num_output_tokens=num_output_tokens,
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            has_structured_output_requests=bool(bound),
            pending_structured_output_tokens=awaits_grammar,
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=preempted,
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )

    def _awaits_last(self, request: Request) -> bool:
        """Return whether the request certainly ends with the token that the step in flight samples."""
        last = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return request.num_output_placeholders > 0 and request.num_computed_tokens + 1 >= last

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append the sampled tokens to their requests; return the outputs of the finished requests."""
        plan = scheduler_output.num_scheduled_tokens
        live = [
            (self.requests[name], num_tokens) for name, num_tokens in plan.items() if name in self.requests
        ]
        if self.connector is not None or any(
            request.sampling_params is None or request.sampling_params.detokenize for request, _ in live
        ):
            return super().update_from_output(scheduler_output, model_runner_output)
        found = model_runner_output.logprobs
        logprobs = [] if found is None else found.logprobs[:, 0].tolist()
        outputs: list[EngineCoreOutput] = []
        finished, preempted = set[Request](), set[Request]()
        for request, num_tokens in live:  # without requests that ended while this step was in flight
            name = request.request_id
            row = model_runner_output.req_id_to_index[name]
            request.num_in_flight_tokens -= num_tokens
            sampled = model_runner_output.sampled_token_ids[row]
            if is_stale := request.num_stale_output_tokens > 0:  # preempted while this step was in flight
                request.num_stale_output_tokens -= num_tokens
            if not sampled or (is_stale and request.drop_stale_output):  # none: a chunk of a prompt
                continue
            request._output_token_ids.append(sampled[0])
            request._all_token_ids.append(sampled[0])
            if request.num_tokens % self.hash_block_size == 0:
                request.update_block_hashes()
            if not is_stale:
                request.num_output_placeholders -= 1
                num_known = request.num_computed_tokens - request.num_output_placeholders
                if num_known % self.hash_block_size == 0:
                    self.kv_cache_manager.cache_blocks(request, num_known)
            self.logprobs.setdefault(name, []).append(logprobs[row])
            is_accepted = self.structured_output_manager.accept_tokens(request, sampled)
            assert is_accepted, f"{name}: token {sampled[0]} was sampled against the request's grammar"
            is_running = request.status == RequestStatus.RUNNING
            if check_stop(request, self.max_model_len):
                outputs.append(self._finish(request))
                (finished if is_running else preempted).add(request)
        self.running = remove_all(self.running, finished)
        self.waiting.remove_requests(preempted)
        self.deferred_waiting.difference_update(preempted)
        return {0: EngineCoreOutputs(outputs=outputs)}

    def _finish(self, request: Request) -> EngineCoreOutput:
        """Free the request; return all of its tokens, without their log-probs."""
        reason = request.get_finished_reason()
        self._free_request(request)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=list(request._output_token_ids),
            finish_reason=reason,
            stop_reason=request.stop_reason,
        )

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish the requests as Scheduler does, and discard their stored log-probs."""
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.logprobs.pop(request.request_id, None)
        return finished
