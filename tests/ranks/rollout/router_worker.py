"""Share of random tokens, per checkpoint, with other experts in the trainer's router than in the engine's.

router_worker.py CHECKPOINT ...
"""

import json
import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import torch  # noqa: E402

from rl.config.schema import Rollout  # noqa: E402
from rl.models import architecture, read_hf_config  # noqa: E402
from rl.rollout.engine import RolloutEngine  # noqa: E402
from rl.rollout.vllm_model import ServedModel  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.layer_spec import moe_utils  # noqa: E402


def main(*checkpoints: str) -> None:
    out: dict[str, list] = {}
    moe_utils.te_general_gemm = None  # as rl.training.layer_spec.block_spec does without TE
    with session(RANKS) as device:
        for checkpoint in checkpoints:
            hf = read_hf_config(checkpoint)
            assert architecture(hf).megatron_config(hf)["moe_router_dtype"] == "fp32"
            rollout = Rollout(max_concurrent_samples=4, cpu_kv_cache_mib=16)
            model = ServedModel(checkpoint, "bfloat16", max_tokens=64, frozen=True)
            engine = RolloutEngine(model, rollout, seed=1, device=device)
            gates = [module for name, module in engine.model.named_modules() if name.endswith(".gate")]
            x = torch.randn(4096, hf["hidden_size"], generator=torch.Generator().manual_seed(1)).bfloat16()
            shares = []
            for gate in gates:
                assert gate.weight.dtype == torch.bfloat16
                trainer = moe_utils.router_gating_linear(x, gate.weight, None, torch.float32)
                rounded = torch.nn.functional.linear(x, gate.weight)
                shares.append([_differing(trainer, logits, hf) for logits in (rounded, gate(x)[0])])
            out[hf["architectures"][0]] = shares
    print(json.dumps(out))


def _differing(logits: torch.Tensor, other: torch.Tensor, hf: dict) -> float:
    """Return the share of rows [E] that differ in the positions of the k largest entries."""
    chosen = [x.topk(hf["num_experts_per_tok"]).indices.sort().values for x in (logits, other)]
    return float((chosen[0] != chosen[1]).any(-1).float().mean())


if __name__ == "__main__":
    main(*sys.argv[1:])
