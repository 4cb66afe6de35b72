"""One rank of test_fp8_refit.py.

    fp8_refit_worker.py CHECKPOINT OUT [KEY=VALUE ...]

Refits a real engine in FP8, and compares what it holds with this rank's part of the quantised values of the
whole tensors. Then drops a region of the plan. Rank 0 writes what it found as JSON to OUT.
"""

import json
import sys
from dataclasses import replace

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import torch  # noqa: E402

from rl.config.options import load  # noqa: E402
from rl.config.schema import Config, resolve  # noqa: E402
from rl.data.prompts import Prompt  # noqa: E402
from rl.engines.engines import build_policy  # noqa: E402
from rl.engines.rollout_engines import build_rollout  # noqa: E402
from rl.features.fp8_engine.staged_refit import GroupedFp8Weights, in_blocks  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.models.boxes import index  # noqa: E402
from rl.models.fp8_blocks import quantised  # noqa: E402
from rl.refit import refit as refits  # noqa: E402
from rl.refit.gather import RefitMismatch  # noqa: E402
from rl.refit.refit import check_refit, check_weights, refit, traffic_metrics  # noqa: E402
from rl.rollout.batches import batch_of  # noqa: E402
from rl.rollout.exchange import exchange  # noqa: E402
from rl.rollout.sampling import Sampling  # noqa: E402
from rl.runtime.collectives import gather_objects  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.micro_batch_plans import plan_minibatch  # noqa: E402
from rl.training.weights import full_weights  # noqa: E402
from tests.ranks.training.megatron_groups import new_grid  # noqa: E402
from tools.hf_reference import random_batch  # noqa: E402

OPTIONS = (
    "model.dtype=bfloat16",
    "training.micro_batch_tokens=96",
    "rollout={max_response_tokens: 16, max_concurrent_samples: 8, cpu_kv_cache_mib: 16, quantization: fp8}",
    "data.max_prompt_tokens=64",
)
SAMPLING = Sampling(1, 24)


def fp8_names(engine) -> list[str]:
    return next(part.names for part in engine.parts if isinstance(part, GroupedFp8Weights))


def wrong_bits(trainer, engine) -> list[str]:
    """Return the tensors with other values or factors in the engine than the quantised whole has."""
    model, wrong = engine.model, []
    of = {
        piece.hf: (weight, piece) for weight in trainer.weight_map.weights for piece in engine.pieces(weight)
    }
    seen = set()
    for name, full in full_weights(trainer.weight_map):
        if name not in of or of[name][0].vllm not in fp8_names(engine):
            continue
        weight, piece = of[name]
        values, factors = quantised(full)
        blocks = [(slice(start // 128, -(-stop // 128))) for start, stop in piece.hf_box]
        held = model.get_parameter(weight.vllm)
        scales = model.get_parameter(weight.vllm + "_scale_inv")
        *expert, rows, columns = piece.local_box
        at = [slice(start // 128, -(-stop // 128)) for start, stop in (rows, columns)]
        there = (*(slice(*box) for box in expert), *at)
        same_values = held[index(piece.local_box)].reshape(values[index(piece.hf_box)].shape)
        same_factors = scales[there].reshape(factors[tuple(blocks)].shape)
        bits = torch.uint8
        if not torch.equal(same_values.view(bits), values[index(piece.hf_box)].view(bits)) or not torch.equal(
            same_factors, factors[tuple(blocks)]
        ):
            wrong.append(name)
        seen.add(weight.vllm)
    assert seen == set(fp8_names(engine))
    return wrong


def largest_gap(trainer, engine, batch, device) -> float:
    drawn = engine.generate(batch.prompt_ids, SAMPLING, list(range(len(batch))))
    mine = drawn if engine.rank_in_replica == 0 else []
    prompts = [Prompt(number, ids, "", "", None, {}) for number, ids in enumerate(batch.prompt_ids)]
    sampled = batch_of(exchange(mine, device), batch.prompt_ids, samples_per_prompt=1, prompts=prompts)
    plan = [plan_minibatch(sampled, list(range(len(sampled))), dp=trainer.grid.dp, max_tokens=96)]
    (found,) = trainer.forward(sampled, plan, ("logprobs",))
    return float((found - sampled.rollout_logprobs)[sampled.mask > 0].abs().max())


def message_of(action, *args) -> str:
    try:
        action(*args)
    except RefitMismatch as mismatch:
        return str(mismatch)
    return ""


def drop_region(trainer, engine) -> None:
    """Remove a copy or a received region of a quantised weight from the plan of this rank."""
    planned = refits._plans[engine][trainer.weight_map]
    key = next(key for key in planned if key == (512, 1))  # of the default buffer
    plan = planned[key].plan
    assert plan.copies, "the ranks of this test train a part of what they generate with"
    planned[key] = replace(planned[key], plan=replace(plan, copies=plan.copies[1:]))


def main(checkpoint: str, out: str, *overrides: str) -> None:
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint)
        config = resolve(load(Config, None, (*OPTIONS, f"model.path={checkpoint}", *overrides)))
        training = config.training
        engine = build_rollout(config, device)
        trainer = build_policy(config, hf, new_grid(training.tp, training.pp, training.ep), device)
        batch = random_batch(hf["vocab_size"])
        found: dict = {"gaps": []}
        for version in (1, 2):
            for _, parameter in trainer.weight_map.local():
                parameter.data.mul_(1.25 if version == 2 else 1.0)
            trainer.version = version
            found["traffic"] = traffic_metrics(refit(trainer, engine, buffer_mib=1), device)
            engine.weights_version = version
            check_refit(trainer, engine, buffer_mib=1)
            check_weights(trainer, engine, buffer_mib=1)
            found["wrong"] = gather_objects(wrong_bits(trainer, engine))
            found["gaps"].append(largest_gap(trainer, engine, batch, device))
        weight_map = trainer.weight_map
        kept = [(parameter, parameter.detach().clone()) for _, parameter in weight_map.local()]
        for weight, parameter in weight_map.local():
            if weight.vllm in fp8_names(engine):
                pieces = weight.megatron_pieces(*weight_map.tensor_split(weight))
                parameter.data.copy_(in_blocks(parameter.detach(), weight, pieces))
        found["gap_of_quantised"] = largest_gap(trainer, engine, batch, device)
        for parameter, values in kept:
            parameter.data.copy_(values)
        name = next(name for name in fp8_names(engine) if "o_proj" in name)
        if RANKS.rank == RANKS.world_size - 1:
            engine.model.get_parameter(name).view(torch.uint8)[1, 0] ^= 8
        found["changed"] = message_of(check_weights, trainer, engine)
        found["names"] = fp8_names(engine)
        refit(trainer, engine)
        if RANKS.rank == RANKS.world_size - 1:
            drop_region(trainer, engine)
        found["dropped"] = message_of(refit, trainer, engine)
        if RANKS.rank == 0:
            with open(out, "w") as file:
                json.dump(found, file)


main(*sys.argv[1:])
