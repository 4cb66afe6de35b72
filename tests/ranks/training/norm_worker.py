"""One rank of test_gradient_norm.py: marks of split weights, and gradient norms with TE's marks.

    norm_worker.py DIRECTORY CHECKPOINT [...]

Rank 0 writes to DIRECTORY/out.json, by architecture, the weights with a mark unlike the layout's. For
the model with latent attention it also writes the norms of one gradient at tp 1 and tp 2, and the error of
an update at tp 2 with TE's marks.
"""

import json
import sys
from pathlib import Path

from megatron_groups import RANKS, new_grid  # isort: skip

from parity_worker import config_of, random_batch

from rl.engines.engines import build_policy
from rl.models import read_hf_config
from rl.runtime.session import session
from rl.training import engine, layer_spec
from rl.training.gradients import WrongReduction
from rl.training.micro_batch_plans import plan_minibatch

MLA = "DeepseekV3ForCausalLM"


class TELinear(layer_spec.DuplicatedLinear):
    """A duplicated linear layer with the marks of TE 2.11's Linear.reset_parameters."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight.tensor_model_parallel = True
        self.weight.partition_dim, self.weight.partition_stride = 0, 1


def norm_of(config, hf: dict, tp: int, device) -> tuple[float, list[str], int]:
    """Return the gradient norm, the names of weights with a wrong mark, and the number of weights."""
    trainer = build_policy(config, hf, new_grid(tp, 1), device)
    marks = [
        (w.hf[0], getattr(t, "tensor_model_parallel", False) == w.cut.split)
        for w, t in trainer.weight_map.local()
    ]
    if hf["architectures"][0] != MLA:
        return 0.0, [name for name, right in marks if not right], len(marks)
    batch = random_batch(hf["vocab_size"])
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum()
        return loss, {"loss": loss}

    norm = trainer.update(batch, plan, minus_logprobs, lr=0.0).grad_norm
    return norm, [name for name, right in marks if not right], len(marks)


def main(directory: str, *checkpoints: str) -> None:
    results = {}
    layer_spec.DuplicatedLinear = TELinear
    mark = engine.mark_split_weights
    with session(RANKS) as device:
        for path in checkpoints:
            hf = read_hf_config(path)
            of_tp = {tp: config_of(path, tp, 1, 1, (1, 1)) for tp in (1, 2)}
            found = {}
            found["tp2"], found["wrong"], found["weights"] = norm_of(of_tp[2], hf, 2, device)
            if hf["architectures"][0] == MLA:
                found["tp1"] = norm_of(of_tp[1], hf, 1, device)[0]
                engine.mark_split_weights = lambda weight_map: None
                try:
                    norm_of(of_tp[2], hf, 2, device)
                except WrongReduction as error:
                    found["tp2 unmended"] = str(error)
                engine.mark_split_weights = mark
            results[hf["architectures"][0]] = found
    if RANKS.rank == 0:
        Path(directory, "out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
