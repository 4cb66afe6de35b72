"""One rank of test_peft_export.py: adapters to and from directories of peft.

    peft_worker.py CHECKPOINT OUT_DIR FIRST SECOND [KEY=VALUE ...]

FIRST and SECOND are layouts, TPxPPxEP, for example 2x1x1. Writes random adapters from the first layout to
OUT_DIR/adapter and the merged model to OUT_DIR/hf, and starts from OUT_DIR/adapter in both layouts. Rank 0
saves the log-probs of all three models to OUT_DIR/logprobs.pt.
"""

import sys
from dataclasses import replace

from rl.runtime.ranks import discover  # noqa: E402
from train_rl import prepare_environment  # noqa: E402

RANKS = discover()
prepare_environment(RANKS)

import torch  # noqa: E402

from rl.checkpoint.hf import export_hf  # noqa: E402
from rl.config.options import load  # noqa: E402
from rl.config.schema import Config, resolve  # noqa: E402
from rl.engines.engines import build_policy  # noqa: E402
from rl.features.adapters.peft import export_peft  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.models.boxes import index  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.micro_batch_plans import plan_minibatch  # noqa: E402
from tests.ranks.training.megatron_groups import new_grid  # noqa: E402
from tools.hf_reference import random_batch  # noqa: E402


@torch.no_grad()
def fill(trainer) -> None:
    """Move every A, B and length by random values that do not depend on the layout, as updates do."""
    learned = trainer.learned_map
    for weight, parameter in learned.local():
        generator = torch.Generator().manual_seed(sum(weight.hf[0].encode()))
        values = 0.1 * torch.randn(weight.shapes[0], generator=generator)
        for piece in weight.megatron_pieces(*learned.tensor_split(weight)):
            parameter[index(piece.local_box)] += values[index(piece.hf_box)]


def logprobs(trainer) -> torch.Tensor:
    batch = random_batch(trainer.weight_map.hf["vocab_size"])
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)
    return trainer.forward(batch, [plan], ("logprobs",))[0]


def main(checkpoint: str, out: str, first: str, second: str, *overrides: str) -> None:
    with session(RANKS) as device:
        hf, found = read_hf_config(checkpoint), {}
        for name, layout in (("written", first), ("same", first), ("other", second)):
            tp, pp, ep = map(int, layout.split("x"))
            sizes = [f"training.{key}={size}" for key, size in (("tp", tp), ("pp", pp), ("ep", ep))]
            options = [f"model.path={checkpoint}", "model.dtype=float32", *sizes, *overrides]
            config = resolve(load(Config, None, options))
            if name != "written":
                adapter = replace(config.adapter, path=f"{out}/adapter", init="zero")
                if config.adapter.init == "pissa":
                    adapter.rank, adapter.alpha = 2 * adapter.rank, 2 * adapter.alpha
                config = replace(config, adapter=adapter)
            trainer = build_policy(config, hf, new_grid(tp, pp, ep, config.training.expert_tp), device)
            if name == "written":
                fill(trainer)
                export_peft(trainer, checkpoint, f"{out}/adapter")
                export_hf(trainer, checkpoint, f"{out}/hf")
            found[name] = logprobs(trainer)
        if RANKS.rank == 0:
            torch.save(found, f"{out}/logprobs.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
