"""Routes of the engine on the ranks that do not lead a replica, with vLLM's own connector."""

from types import SimpleNamespace

import pytest
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

from rl.rollout.routes import read_no_routes


def test_ranks_that_do_not_lead_schedule_without_routes():
    connector = AuxOutputSchedulerConnector.__new__(AuxOutputSchedulerConnector)
    request = SimpleNamespace(request_id="0", num_tokens=4)
    with pytest.raises(AssertionError, match="worker output is missing"):
        connector.take_output(request, None)
    read_no_routes(SimpleNamespace(aux_output_connector=connector))
    assert connector.take_output(request, None) is None
    read_no_routes(SimpleNamespace(aux_output_connector=None))
