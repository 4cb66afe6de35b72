"""Routes of the engine, with vLLM's own connector and requests."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from rl.features.router_replay.engine import CpuRoutes, RouteCollector
from tests.checkpoints import tiny_config


def test_ranks_that_do_not_lead_schedule_without_routes():
    request = SimpleNamespace(request_id="0", num_tokens=4)
    options = SimpleNamespace(aux_output_config=SimpleNamespace(enabled=True))
    hf = dict(tiny_config("Qwen3MoeForCausalLM").to_dict())

    def engine(leads: bool) -> SimpleNamespace:
        connector = AuxOutputSchedulerConnector.__new__(AuxOutputSchedulerConnector)
        scheduler = SimpleNamespace(aux_output_connector=connector)
        llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=options))
        return SimpleNamespace(leads=leads, hf=hf, llm=llm, scheduler=scheduler)

    leader, other = engine(True), engine(False)
    for each in (leader, other):
        RouteCollector().built(each)
    with pytest.raises(AssertionError, match="worker output is missing"):
        leader.scheduler.aux_output_connector.take_output(request, None)
    assert other.scheduler.aux_output_connector.take_output(request, None) is None
    other.scheduler.aux_output_connector = None  # the CPU engine has none
    RouteCollector().built(other)


def test_a_request_that_is_preempted_keeps_the_routes_of_the_token_in_flight():
    routes = CpuRoutes.__new__(CpuRoutes)
    routes._slots, routes._block_size, routes._freed = np.arange(8)[:, None, None], 4, {}
    routes._blocks_of, routes._group = lambda name: ([1, 0],), 0
    request = Request("0", [5, 6, 7], SamplingParams(max_tokens=2), None)
    request.append_output_token_ids(8)
    request.num_computed_tokens, request.num_output_placeholders = 4, 1  # as it is preempted
    routes._keep(request)
    request.append_output_token_ids(9)
    request.num_computed_tokens = request.num_output_placeholders = 0
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    routes._keep(request)
    assert routes.take("0").flatten().tolist() == [4, 5, 6, 7]
