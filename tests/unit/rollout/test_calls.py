"""Requests that vLLM's core accepts for samples of a prompt, with vLLM's own types."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from rl.rollout.calls import Calls
from rl.rollout.samples import Request
from rl.rollout.sampling import Sampling

SAMPLING = Sampling(2, 8, temperature=0.7, stop_token_ids=(5,))
FIRST = Request("0.0", np.array([1, 2, 3], np.int32), 11, 8)


class Vllm:
    """Stands for LLMEngine and its parts: completes arguments as vLLM does, and keeps what it accepts."""

    assign_request_id = staticmethod(InputProcessor.assign_request_id)

    def __init__(self):
        self.input_processor = self.output_processor = self.engine_core = self
        self.processed, self.accepted, self.requests = [], [], {}

    def get_supported_tasks(self):
        return ("generate",)

    def process_inputs(self, name, prompt, params, *, supported_tasks, lora_request=None):
        self.processed.append(name)
        params = params.clone()
        params.update_from_generation_config({}, 2)
        tokens, salt = prompt["prompt_token_ids"], prompt.get("cache_salt")
        return EngineCoreRequest(name, tokens, None, params, None, 0.0, lora_request, salt, None)

    def add_request(self, made, *prompt_text):
        if not prompt_text:
            self.accepted.append(made)
        params = made.sampling_params
        self.requests[made.request_id] = SimpleNamespace(sampling_params=params, num_output_tokens=0)


class Seeds:
    """Gives vLLM the seed in both places, and the adapter's number."""

    def request(self, engine, request, call):
        call.params.seed, call.options["lora_request"] = request.seed, request.adapter


def calls_of(vllm):
    engine = SimpleNamespace(llm=SimpleNamespace(llm_engine=vllm), scheduler=vllm)
    engine.weights_version, engine.keeps_cache, engine.parts = 3, True, [Seeds()]
    engine.platform = SimpleNamespace(logprobs_so_far=lambda engine, name: [])
    return Calls(engine)


def accepted(requests):
    """Return what vLLM accepts if it processes each request by itself."""
    found = []
    for request in requests:
        vllm = Vllm()
        calls_of(vllm).add(request, SAMPLING)
        found += vllm.accepted
    return found


def without_suffix(made):
    made.request_id = made.external_req_id
    return made


def test_samples_of_a_prompt_are_processed_once():
    other = np.array([4, 5], np.int32)
    requests = [
        FIRST,
        replace(FIRST, name="0.1", seed=12, token_ids=FIRST.token_ids.copy()),
        Request("1.0", other, 13, 8),
        Request("1.1", other, 14, 8),
    ]
    vllm = Vllm()
    calls = calls_of(vllm)
    for request in requests:
        calls.add(request, SAMPLING)
    assert vllm.processed == ["0.0", "1.0"]
    assert len({made.request_id for made in vllm.accepted}) == 4
    assert [made.sampling_params.extra_args["seed"] for made in vllm.accepted] == [11, 12, 13, 14]
    assert [made.sampling_params.seed for made in vllm.accepted] == [11, 12, 13, 14]
    assert [*map(without_suffix, vllm.accepted)] == [*map(without_suffix, accepted(requests))]
    assert [calls._live[request.name].seed for request in requests] == [11, 12, 13, 14]


@pytest.mark.parametrize("change", [{"max_tokens": 7}, {"adapter": 1}, {"first_version": 2}])
def test_another_request_for_the_prompt_is_processed_again(change):
    vllm = Vllm()
    calls = calls_of(vllm)
    for request in (FIRST, second := replace(FIRST, name="0.1", **change)):
        calls.add(request, SAMPLING)
    assert vllm.processed == ["0.0", "0.1"]
    assert without_suffix(vllm.accepted[1]) == without_suffix(*accepted([second]))


def test_new_weights_are_a_new_salt_for_further_samples():
    vllm = Vllm()
    calls = calls_of(vllm)
    calls.add(FIRST, SAMPLING)
    calls.note_version(4)
    calls.add(replace(FIRST, name="0.1"), SAMPLING)
    assert [made.cache_salt for made in vllm.accepted] == ["v3", "v4"]
    assert [*calls._live["0.1"].versions(1)] == [4]
