"""One rank of test_link.py.

    link_worker.py CHECKPOINT OUT CASE [CASE ...]

CASE is TRAIN,ROLLOUT:TPxPPxEP:TP, the numbers of ranks and the layouts of the two roles. For example,
2,2:2x1x1:1 trains at tp 2 on two ranks and generates with two replicas of tp 1. For each case two refits, one
with a changed weight on its way, and samples from each replica. Each rank writes a JSON list to OUT.<rank>.
"""

import json
import socket
import sys

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402

import rl.features.roles.link as link_module  # noqa: E402
from rl.config.schema import Config, Model, Refit, Training  # noqa: E402
from rl.features.roles.link import Link  # noqa: E402
from rl.models import architecture, read_hf_config  # noqa: E402
from rl.models.boxes import volume, whole  # noqa: E402
from rl.models.files import TensorReader, tensor_files  # noqa: E402
from rl.refit.gather import RefitMismatch  # noqa: E402
from rl.rollout.samples import Sample, Segment  # noqa: E402
from rl.runtime import session  # noqa: E402
from rl.runtime.device import choose_device  # noqa: E402
from rl.runtime.job_store import StoreProcess, connect_to  # noqa: E402
from rl.training.engine import TrainingEngine  # noqa: E402
from rl.training.spec import ModelSpec  # noqa: E402
from tests.ranks.refit.refit_worker import RANKS, PlainEngine, contents, differing, poison, rollout_config
from tests.ranks.training.megatron_groups import new_grid  # noqa: E402

WAIT_S = 60
SECRET = bytes(32)


def train(link, config, hf, store) -> dict:
    """Send two versions; the second is the first times 1.5. Then receive the samples of all replicas."""
    grid = new_grid(config.training.tp, config.training.pp, config.training.ep)
    trainer = TrainingEngine(ModelSpec(config.model.path, hf, "float32"), config.training, grid, link.device)
    link.plan_weights(config, hf, trainer=trainer)
    sent = []
    for version in (0, 1):
        link.send_weights(version)
        dist.barrier()  # this role goes on; no generator receives before it has
        if dist.get_rank() == 0:
            store.set(f"computed {version}", "")
        sent.append(link.wait_sent().sent)
        for parameter in trainer.weight_map.parameters.values():
            parameter.data.mul_(1.5)
    deliveries = []
    replicas = len(link.rollout) // config.rollout.tp
    while len(deliveries) < 2 * replicas:
        deliveries += link.receive_samples(timeout_s=1.0)
    told = [
        [d.key, d.source, *(s.token_ids.tolist() + s.logprobs.tolist() for s in d.samples)]
        for d in deliveries
    ]
    return dict(planned=link._planned[0].plan.bytes_sent, sent=sent, deliveries=told)


def generate(link, config, hf, store) -> dict:
    """Receive two versions, and compare them with the checkpoint's."""
    weights, rank = architecture(hf).weights(hf), dist.get_rank()
    engine = PlainEngine(weights, config.rollout.tp, link.device, config.rollout.ep)
    files = tensor_files(config.model.path, weights)
    reader = TensorReader(files)
    whole_tensors = {
        name: reader.read(name, whole(shape)).float()
        for weight in weights
        for name, shape in zip(weight.hf, weight.shapes)
    }
    link.plan_weights(config, hf, engine=engine)
    out: dict = dict(planned=link._planned[0].plan.bytes_received, received=[], differing=[], mismatch="")
    pieces = (piece for w in weights for piece in engine.pieces(w))
    out["needed"] = 4 * sum(volume(piece.hf_box) for piece in pieces)
    for version in (0, 1):
        assert store.wait([f"computed {version}"], WAIT_S)
        poison(engine)
        if version == 1 and link.rank == link.rollout[-1]:
            link_module.transfer = damaging(engine)
        try:
            out["received"].append(link.receive_weights(version).received)
        except RefitMismatch as mismatch:
            out["mismatch"] = str(mismatch)
        found = contents(engine)
        engine.load_weights(whole_tensors.items())
        expected = contents(engine)
        for name, parameter in engine.weights().items():
            parameter.data.copy_(found[name])
        link.check_weights()
        out["differing"].append(differing(engine, expected))
        whole_tensors = {name: tensor * 1.5 for name, tensor in whole_tensors.items()}
        assert engine.weights_version == version
    if engine.rank_in_replica == 0:
        tokens = np.arange(rank, rank + 3, dtype=np.int32)
        segment = Segment(tokens, tokens.astype(np.float32) / 3, np.zeros(3, np.int32))
        for number in range(2):
            link.send_samples(["group", number], [Sample(number, 0, (segment,))] * 2)
    return out


def damaging(engine):
    """The transfer, after which one element of the engine is changed, as by a broken network."""
    original = link_module.transfer

    def transfer(*args):
        link_module.transfer = original
        done = original(*args)
        name = next(name for name in engine.weights() if "layers.1.mlp" in name and "norm" not in name)
        engine.weights()[name].data.view(-1)[3] += 1e-3
        return done

    return transfer


def enter_role(num_train: int, device):
    """Make this rank's role its world; return (torch's store of the job, the job's store, whether it
    trains)."""
    job = dist.TCPStore(
        RANKS.master_addr, RANKS.master_port, RANKS.world_size, RANKS.rank == 0, wait_for_workers=False
    )
    if RANKS.rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        job.set("port", str(listener.getsockname()[1]))
        process = StoreProcess(listener, SECRET)  # ends with this one  # noqa: F841
    own = connect_to("127.0.0.1", int(job.get("port")), SECRET)
    trains = RANKS.rank < num_train
    role = dist.PrefixStore("train" if trains else "rollout", job)
    rank = RANKS.rank if trains else RANKS.rank - num_train
    size = num_train if trains else RANKS.world_size - num_train
    dist.init_process_group(device.backend, store=role, rank=rank, world_size=size)
    session._gloo_group = dist.new_group(backend="gloo")
    return job, own, trains


def main(checkpoint: str, out: str, *cases: str) -> None:
    device, hf, results = choose_device(RANKS.local_rank), read_hf_config(checkpoint), []
    counts = [int(n) for n in cases[0].split(":")[0].split(",")]
    job, own, trains = enter_role(counts[0], device)
    for number, case in enumerate(cases):
        _, training, tp = case.split(":")
        sizes = dict(zip(("tp", "pp", "ep"), map(int, training.split("x"))))
        config = Config(
            model=Model(path=checkpoint, dtype="float32"),
            training=Training(**sizes),
            rollout=rollout_config(checkpoint, int(tp)),
            refit=Refit(buffer_mib=1, check_every=1),
        )
        ranks = range(RANKS.world_size)
        store = own.clone(f"case {number}")
        link = Link(
            store,
            dist.PrefixStore(f"case {number}", job),
            rank=RANKS.rank,
            train=tuple(ranks[: counts[0]]),
            rollout=tuple(ranks[counts[0] :]),
            device=device,
        )
        results.append((train if trains else generate)(link, config, hf, store))
        dist.barrier(group=link._control)
        for group in (link._control, link._weights):  # a process has one link, and the cases the same names
            dist.destroy_process_group(group)
    with open(f"{out}.{RANKS.rank}", "w") as file:
        json.dump(results, file)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
