"""One rank of test_refit.py.

    refit_worker.py CHECKPOINT OUT ENGINE LAYOUT [LAYOUT ...]

ENGINE is vllm:TP or plain:TP[xEP][,TP[xEP]...], LAYOUT is TPxPP[xEPxETP]. For example, `vllm:2 1x2` refits
from two pipeline stages to an engine of tp 2.

For each training layout and rollout TP: what a refit moved, counted where tensors are handed to the
transport, and whether the engine's parameters are then what its own loader makes of whole tensors. Each rank
writes a JSON list to OUT.<rank>.
"""

import json
import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rl.config.schema import Config, Data, Model, Rollout, Training, resolve  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.models.layout import VOCAB, index, padded_vocab, vocab_multiple  # noqa: E402
from rl.models.placement import RolloutPlacement, count_experts  # noqa: E402
from rl.refit import gather  # noqa: E402
from rl.refit.gather import RefitMismatch  # noqa: E402
from rl.refit.refit import check_refit, refit  # noqa: E402
from rl.refit.values import values_of  # noqa: E402
from rl.rollout.engine import RolloutEngine  # noqa: E402
from rl.rollout.vllm_model import ServedModel  # noqa: E402
from rl.runtime import checksum  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.engine import TrainingEngine  # noqa: E402
from rl.training.spec import ModelSpec  # noqa: E402
from tests.ranks.training.megatron_groups import new_grid  # noqa: E402

BUFFER_MIB = 1


class PlainEngine:
    """Parameters as vLLM's, without vLLM: a process can have several, of any tensor parallel size. Its loader
    takes pieces by the layout, which tests/unit/models/test_layout.py and the runs on vLLM check."""

    def __init__(self, weights, tp, device, ep=1, dtype=torch.float32):
        self.tp, self.rank_in_replica, self.device, self.changes = tp, dist.get_rank() % tp, device, 0
        self.slots, self.parts = None, []
        experts = count_experts(weights)
        self.placement = RolloutPlacement(dist.get_world_size(), tp, 9, ep=ep, num_experts=experts)
        shapes = {}
        dtypes = {weight.vllm: torch.float32 if weight.float32 else dtype for weight in weights}
        for weight in weights:
            if weight.cut is VOCAB:
                rows, *rest = weight.shapes[0]
                shapes[weight.vllm] = (padded_vocab(rows, vocab_multiple(tp)) // tp, *rest)
                continue
            for piece in self.pieces(weight):
                stops = tuple(stop for _, stop in piece.local_box)
                shapes[weight.vllm] = tuple(map(max, stops, shapes.get(weight.vllm, stops)))
        self.parameters = {
            name: torch.full(shape, torch.nan, dtype=dtypes[name]) for name, shape in shapes.items()
        }
        self.targets = {piece.hf: (weight.vllm, piece) for weight in weights for piece in self.pieces(weight)}
        self.padded = {weight.vllm: weight.shapes[0][0] for weight in weights if weight.cut is VOCAB}

    def pieces(self, weight):
        return self.placement.pieces_on(weight, dist.get_rank())

    def weights(self):
        return self.parameters

    def load_weights(self, weights):
        for name, full in weights:
            if name not in self.targets:
                continue
            into, piece = self.targets[name]
            target = self.parameters[into][index(piece.local_box)]
            target.copy_(full[index(piece.hf_box)].reshape(target.shape))
        for name, rows in self.padded.items():
            size = self.parameters[name].shape[0]
            self.parameters[name][max(0, rows - self.rank_in_replica * size) :] = 0
        self.weights_changed()

    def weights_changed(self):
        self.changes += 1


class NewMemory(TorchDispatchMode):
    """Bytes of every storage that an operation makes, added up: at least what lives at a time."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if torch.is_tensor(t)
        }
        if torch.is_tensor(out) and out.untyped_storage().data_ptr() not in known:
            self.num_bytes += out.untyped_storage().nbytes()
        return out


class Counted:
    """Bytes handed to torch.distributed for point-to-point messages."""

    def __enter__(self):
        self.received = self.sent = self.largest_call = 0
        self.original = dist.batch_isend_irecv
        dist.batch_isend_irecv = self.count
        return self

    def count(self, operations):
        self.largest_call = max(self.largest_call, len(operations))
        for operation in operations:
            if operation.op is dist.irecv:
                self.received += operation.tensor.nbytes
            else:
                self.sent += operation.tensor.nbytes
        return self.original(operations)

    def __exit__(self, *_):
        dist.batch_isend_irecv = self.original


def lower_bound(trainer, engine, *, without: str = "") -> int:
    """Bytes of this rank's engine, one parameter left out, that its trainer does not hold: counted element by
    element."""
    local = {weight.hf for weight, _ in trainer.weight_map.local()}
    total = 0
    for weight in trainer.weight_map.weights:
        if weight.vllm == without:
            continue
        missing = {
            name: torch.zeros(shape, dtype=torch.bool) for name, shape in zip(weight.hf, weight.shapes)
        }
        for piece in engine.pieces(weight):
            missing[piece.hf][index(piece.hf_box)] = True
        if weight.hf in local:
            for piece in weight.megatron_pieces(*trainer.weight_map.tensor_split(weight)):
                missing[piece.hf][index(piece.hf_box)] = False
        total += sum(int(mask.sum()) for mask in missing.values()) * 4
    return total


def poison(engine) -> None:
    for parameter in engine.weights().values():
        parameter.data.fill_(torch.nan)


def contents(engine) -> dict:
    return {name: parameter.detach().clone() for name, parameter in engine.weights().items()}


def differing(engine, expected: dict) -> list[str]:
    bits = checksum.bits
    return [
        name for name, found in engine.weights().items() if not torch.equal(bits(found), bits(expected[name]))
    ]


def largest_slice(engine) -> int:
    return max(parameter.nbytes for parameter in engine.weights().values())


def examine(trainer, engine) -> dict:
    """One refit in place, over poisoned parameters."""
    engine.load_weights(trainer.full_weights())
    expected = contents(engine)
    poison(engine)
    with Counted() as counted, NewMemory() as memory:
        traffic = refit(trainer, engine, buffer_mib=BUFFER_MIB)
    check_refit(trainer, engine, buffer_mib=BUFFER_MIB)
    return dict(
        differing=differing(engine, expected),
        received=counted.received,
        reported=[traffic.received, traffic.sent, traffic.fallback],
        sent=counted.sent,
        lower_bound=lower_bound(trainer, engine),
        local=traffic.local,
        largest_call=counted.largest_call,
        new_memory=memory.num_bytes,
        memory_limit=(BUFFER_MIB << 20) + largest_slice(engine),
        changed=corrupted(trainer, engine),
    )


def corrupted(trainer, engine) -> dict:
    """Return the messages of the check for one changed element on the last rank, for two exchanged
    elements, and after the next refit."""
    said = {}
    last = trainer.weight_map.placement.num_layers - 1
    names = [name for name in engine.weights() if f"layers.{last}." in name]
    name = next(name for kind in ("w2_weight", "down_proj") for name in names if kind in name)
    parameter = engine.weights()[name].data
    row = parameter[0] if parameter.ndim == 2 else parameter[1, 0]
    for change in ("element", "exchange"):
        if RANKS.rank == RANKS.world_size - 1:
            if change == "element":
                row[3] += 1e-6
            else:
                row[[3, 5]] = row[[5, 3]]
        try:
            check_refit(trainer, engine, buffer_mib=BUFFER_MIB)
        except RefitMismatch as mismatch:
            said[change] = str(mismatch)
        refit(trainer, engine, buffer_mib=BUFFER_MIB)
    check_refit(trainer, engine, buffer_mib=BUFFER_MIB)
    return said | {"first_column": next(p for v, p in pieces_of(trainer, engine, name)).hf_box[1][0]}


def pieces_of(trainer, engine, name):
    weights = [weight for weight in trainer.weight_map.weights if weight.vllm == name]
    for weight in weights:
        for piece in engine.pieces(weight):
            yield weight, piece


def examine_fallback(trainer, engine) -> dict:
    """An engine that holds one parameter in another dtype: only that one goes through its loader."""
    name = "model.layers.1.self_attn.o_proj.weight"
    held = engine.parameters
    held[name] = held[name].to(torch.bfloat16)
    engine.load_weights(trainer.full_weights())
    expected = contents(engine)
    poison(engine)
    with Counted() as counted:
        traffic = refit(trainer, engine, buffer_mib=BUFFER_MIB)
    out = dict(differing=differing(engine, expected), fallback=traffic.fallback, received=counted.received)
    (values,) = values_of(trainer)
    same = [weight for weight in trainer.weight_map.weights if weight.vllm == name]
    texts = gather.differences(values, engine, engine.weights(), same)
    return out | dict(lower_bound=lower_bound(trainer, engine, without=name), bfloat16_says=len(texts))


def examine_replicas(trainer, engine) -> str:
    """Return the message of the check after the weights of one of two training replicas changed."""
    refit(trainer, engine, buffer_mib=BUFFER_MIB)
    if trainer.weight_map.grid.dp_rank == 1:
        for parameter in trainer.weight_map.parameters.values():
            parameter.data.mul_(1.5)
    try:
        check_refit(trainer, engine, buffer_mib=BUFFER_MIB)
    except RefitMismatch as mismatch:
        return str(mismatch)
    return ""


def main(checkpoint: str, out: str, engine_kind: str, *layouts: str) -> None:
    kind, tps = engine_kind.split(":")
    results = []
    with session(RANKS) as device:
        hf = read_hf_config(checkpoint)
        engine = None
        for layout in layouts:
            tp, pp, *expert = map(int, layout.split("x"))
            training = Training(tp=tp, pp=pp, **dict(zip(("ep", "etp"), expert)))
            grid = new_grid(tp, pp, *expert)
            trainer = TrainingEngine(ModelSpec(checkpoint, hf, "float32"), training, grid, device)
            for name in tps.split(","):
                sizes = [int(size) for size in name.split("x")]
                if kind == "plain":
                    engine = PlainEngine(trainer.weight_map.weights, sizes[0], device, *sizes[1:])
                elif engine is None:
                    rollout = rollout_config(checkpoint, sizes[0])
                    model = ServedModel(checkpoint, "float32", max_tokens=128)
                    engine = RolloutEngine(model, rollout, seed=1, device=device)
                results.append(dict(layout=layout, rollout_tp=name) | examine(trainer, engine))
            if kind == "plain" and layout == "2x1":
                results[-1]["replicas"] = examine_replicas(
                    trainer, PlainEngine(trainer.weight_map.weights, 4, device)
                )
        if kind == "plain" and not expert:
            results[-1]["fallback"] = examine_fallback(
                trainer, PlainEngine(trainer.weight_map.weights, 2, device)
            )
        with open(f"{out}.{RANKS.rank}", "w") as file:
            json.dump(results, file)
        dist.barrier()


def rollout_config(checkpoint: str, tp: int) -> Rollout:
    rollout = Rollout(tp=tp, max_response_tokens=64, max_concurrent_samples=4, cpu_kv_cache_mib=16)
    model = Model(path=checkpoint, dtype="float32")
    return resolve(Config(model=model, data=Data(max_prompt_tokens=64), rollout=rollout)).rollout


if __name__ == "__main__":
    main(*sys.argv[1:])
