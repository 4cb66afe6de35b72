"""The experts that the engine chose for each token, for router replay in the trainer.

On a GPU vLLM returns them with a completion (`enable_return_routed_experts`). Its CPU engine cannot, because
that part of vLLM belongs to a model runner that needs Triton. There `CpuRoutes` takes the choices from the
same callbacks of vLLM's routers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from rl.config.adapter import Adapter
from rl.config.schema import Config
from rl.models import architecture
from rl.rollout.parts import EnginePart
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.request import Request

    from rl.rollout.engine import RolloutEngine


class RouteCollector(EnginePart):
    """Adds the routes to the completions of a replica's leader, [C + R - 1, L, k] for C and R tokens.

    L: layers that are mixtures of experts.
    """

    def options(self, engine: "RolloutEngine") -> dict:
        from vllm.platforms import current_platform

        return {"enable_return_routed_experts": not current_platform.is_cpu()}

    def built(self, engine: "RolloutEngine") -> None:
        frequencies = architecture(engine.hf).megatron_config(engine.hf).get("moe_layer_freq", [])
        self._layers = [layer for layer, is_moe in enumerate(frequencies) if is_moe]
        self._on_cpu: CpuRoutes | None = None
        if not engine.leads:
            read_no_routes(engine.scheduler)
        elif not engine.llm.llm_engine.vllm_config.aux_output_config.enabled:
            self._on_cpu = CpuRoutes(self._layers, engine)

    def begin(self, engine: "RolloutEngine") -> None:
        if self._on_cpu is not None:
            self._on_cpu.clear()

    def completion(
        self, engine: "RolloutEngine", internal_id: str, output: "CompletionOutput"
    ) -> dict[str, np.ndarray]:
        if not engine.leads:
            return {}
        if self._on_cpu is not None:
            return {"routes": self._on_cpu.take(internal_id)}
        assert output.routed_experts is not None
        return {"routes": output.routed_experts[:, self._layers]}


def read_no_routes(scheduler: Any) -> None:
    """Let a rank that does not lead its replica schedule without the routes of its requests.

    vLLM's first rank alone collects them, but with external_launcher every rank has a scheduler, which would
    require them of its own worker.
    """
    if getattr(scheduler, "aux_output_connector", None) is not None:  # vLLM 0.25 has none
        replace_attribute(scheduler.aux_output_connector, "take_output", lambda request, output: None)


class CpuRoutes:
    """Stores the choices of every router, at the slots of the tokens' keys in the KV cache.

    Requests that share a cached prefix thereby share its routes, and a chunk of a prompt needs no special
    case. A preempted request computes its keys again, but keeps the routes of the passes that sampled its
    tokens. Takes L * k bytes per slot: for example, 48 layers of experts with 8 of 128 experts take 384.

    layers: the model's layers that are mixtures of experts.
    """

    def __init__(self, layers: list[int], engine: "RolloutEngine") -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        config, scheduler = engine.llm.llm_engine.model_config, engine.scheduler
        manager = scheduler.kv_cache_manager
        self._blocks_of, self._block_size = manager.get_block_ids, scheduler.block_size
        self._group, self._layer = _group_of_all_tokens(scheduler.kv_cache_config.kv_cache_groups)
        self._place = {layer: place for place, layer in enumerate(layers)}
        slots = manager.block_pool.num_gpu_blocks * self._block_size
        dtype = np.uint8 if config.get_num_experts() <= 256 else np.uint16
        self._slots = np.zeros((slots, len(layers), config.get_num_experts_per_tok()), dtype)
        self._freed: dict[str, np.ndarray] = {}
        """Routes of requests after their blocks were freed, by vLLM's internal id."""
        capturer: Any = self  # has the one method that the routers call
        bind_routed_experts_capturer(engine.model, capturer)
        scheduler.before_free = self._keep

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Store the choices of one layer for the tokens of an engine step; called by vLLM's routers."""
        from vllm.forward_context import get_forward_context

        of_layers = get_forward_context().slot_mapping
        assert isinstance(of_layers, dict), "the step is not cut in two"
        slots = of_layers[self._layer]
        assert len(slots) == len(topk_ids), "the engine pads its steps"
        real = slots >= 0  # a dummy step has no slots
        self._slots[slots[real].numpy(), self._place[layer_id]] = topk_ids[real].numpy()

    def _keep(self, request: "Request") -> None:
        """Copy the routes of a request before its blocks of the cache are freed."""
        known = self._freed.get(request.request_id, self._slots[:0])
        # A request that is preempted also keeps the token that the step in flight has sampled.
        in_flight = 0 if request.is_finished() else request.num_output_placeholders
        end = request.num_tokens - 1 + in_flight
        positions = np.arange(len(known), end)
        if not request.num_output_tokens + in_flight or request.num_computed_tokens < end:
            return  # it has no tokens, or was preempted and has not computed its context again
        blocks = np.array(self._blocks_of(request.request_id)[self._group], np.int64)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        self._freed[request.request_id] = np.concatenate([known, self._slots[slots]])

    def take(self, request_id: str) -> np.ndarray:
        """Return the routes of a request that has ended, and forget them."""
        return self._freed.pop(request_id)

    def clear(self) -> None:
        """Forget the routes of requests without a completion."""
        self._freed.clear()


def _group_of_all_tokens(groups: "Sequence[KVCacheGroupSpec]") -> tuple[int, str]:
    """Return the index and a layer of the first group of vLLM's caches that keeps the whole context.

    Layers with a window free the blocks of tokens outside of it. Layers with a recurrent state have no blocks
    of tokens.
    """
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    partial = SlidingWindowSpec, MambaSpec
    whole = (i for i, group in enumerate(groups) if not isinstance(group.kv_cache_spec, partial))
    index = next(whole, 0)
    return index, groups[index].layer_names[0]


def parts(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the parts of an engine: its routes, if the trainer replays them."""
    return [RouteCollector()] if config.training.router_replay == "engine" else []
