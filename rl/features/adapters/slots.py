"""Low-rank adapters in vLLM: the buffers that hold them, and the requests that use them.

In every adapted linear layer, vLLM has buffers for the A and B of several adapters. For each token, vLLM adds
B A x of the token's adapter to W x. A refit writes this rank's parts of A and scale * B into these buffers in
place, in the same way as it writes weights (`rl.refit.refit`). vLLM's own loader of adapters is not used,
because it reads files and applies a scale of its own.

When the values of an adapter change, its name stays the same, so running requests use the new values from the
next engine step on. Each entry of vLLM's prefix cache is marked with the version at which its request began.
For example, keys and values that were cached at version 3 cannot serve a request that begins at version 4
(vLLM #42125).
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rl.config.adapter import Adapter
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.models import architecture
from rl.models.adapters import LowRank, adapters
from rl.rollout import cpu_support
from rl.rollout.calls import EngineCall
from rl.rollout.parts import EnginePart, WeightSlots
from rl.rollout.samples import Request
from rl.runtime.replacement import replace_attribute

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from rl.rollout.engine import RolloutEngine

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as `max_lora_rank`."""


@functools.cache
def keep_experts_kernels() -> None:
    """Make vLLM compute routed experts in the same way as in an engine without adapters.

    This project gives routed experts no adapters in vLLM. Without this change, vLLM ignores `moe_backend` in
    an engine with adapters. On CPU it then chooses Triton, which has no CPU kernels. On recent GPUs it
    chooses kernels that reorder the experts' weights (`rl.rollout.vllm_model`).
    """
    from vllm.model_executor.layers.fused_moe import layer

    build = layer.FusedMoEConfig
    replace_attribute(layer, "FusedMoEConfig", lambda **fields: build(**fields | {"is_lora_enabled": False}))


def _module(pair: LowRank) -> str:
    """Return vLLM's name of the layer that holds the adapted layer, for example a name ending in qkv_proj."""
    return pair.base.vllm.removesuffix(".weight")


def _layer(pair: LowRank) -> str:
    """Return the adapted layer's own name in vLLM, for example one ending in q_proj, a part of qkv_proj."""
    return f"{_module(pair).rpartition('.')[0]}.{pair.module.rpartition('.')[2]}"


def _lora_request(index: int) -> "LoRARequest":
    """Return the part of a request that names an adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter {index}", 1 + index, lora_path="memory")


class AdapterSlots(WeightSlots):
    """Holds the adapters of an engine, by index. All of them adapt the same layers.

    If the rank of an adapter is lower than the rank of the buffers, the rest of the buffers stays 0.
    """

    def __init__(self, adapters: Sequence[Adapter]):
        self._adapters = adapters
        self.versions = [-1] * len(adapters)

    def options(self, engine: "RolloutEngine") -> dict:
        keep_experts_kernels()
        cpu_support.multiply_adapters_by_group()
        first, weights = self._adapters[0], architecture(engine.hf).weights(engine.hf)
        self.pairs = adapters(weights, rank=first.rank, targets=first.targets)
        largest = max(adapter.rank for adapter in self._adapters)
        return dict(
            enable_lora=True,
            max_loras=len(self._adapters),
            max_lora_rank=next(size for size in RANKS if size >= largest),
            # Only the last parts of the names, because some layers have several whole names in vLLM.
            lora_target_modules=sorted({_module(pair).rpartition(".")[2] for pair in self.pairs}),
        )

    def built(self, engine: "RolloutEngine") -> None:
        self._manager = engine.runner.lora_manager._adapter_manager
        held = {
            part: (module, number)
            for name, module in self._manager.modules.items()
            for number, part in enumerate(self._manager.packed_modules.get(name, [name]))
        }
        names = [_layer(pair) for pair in self.pairs]
        if absent := [name for name in names if name not in held]:
            raise ConfigError(
                f"adapter.in_engine=adapter, but vLLM applies no adapter to {absent[0]} ({len(absent)} such "
                "layers); use adapter.in_engine=merged."
            )
        self._layers = [held[name] for name in names]
        for index in range(len(self._adapters)):
            self._add(index)

    def request(self, engine: "RolloutEngine", request: Request, call: EngineCall) -> None:
        call.options["lora_request"] = _lora_request(request.adapter)
        call.version = self.versions[request.adapter]
        call.prompt.setdefault("cache_salt", f"v{call.version}")

    def wake(self, engine: "RolloutEngine", what: str) -> None:
        if what != "weights" or not engine.device.is_cuda:
            return
        self.has_base, self.versions = False, [-1] * len(self.versions)  # vLLM's sleep discarded them
        for module in self._manager.modules.values():
            for index in range(len(self.versions)):
                module.reset_lora(index)
        # vLLM maps tokens to adapters again only if the mapping differs from the last mapping.
        self._manager._last_mapping = None

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        # A vLLM layer with adapters contains the original layer as `base_layer`.
        return {name.replace(".base_layer.", "."): weight for name, weight in weights.items()}

    def _add(self, index: int) -> None:
        """Register an adapter with this index in vLLM. Its buffers hold zeros."""
        from vllm.lora.lora_model import LoRAModel

        manager = self._manager
        model = LoRAModel(_lora_request(index).lora_int_id, 0, {})
        manager._registered_adapters[model.id] = model
        manager.activate_adapter(model.id)  # in the first free place
        assert manager.lora_index_to_id[index] == model.id

    def buffers(self, slot: int) -> dict[str, Tensor]:
        """Return this rank's parts of A and B of the adapter `slot`, as views of vLLM's buffers."""
        out: dict[str, Tensor] = {}
        rank = self._adapters[slot].rank
        for pair, (module, number) in zip(self.pairs, self._layers):
            out[pair.a.vllm] = module.lora_a_stacked[number][slot, 0, :rank]
            out[pair.b.vllm] = module.lora_b_stacked[number][slot, 0, :, :rank]
        return out


def parts(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the engine parts for these adapters; [] if the engine holds none beside its weights."""
    return [AdapterSlots(adapters)] if adapters else []
