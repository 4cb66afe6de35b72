"""One rank of test_layouts.py and test_faults.py, which test the checkpoint store with tiny engines and
without a run.

    store_worker.py layouts MODEL OUT_DIR DTYPES LAYOUT [LAYOUT ...]
    store_worker.py faults MODEL OUT_DIR OTHER_MODEL SMALL_DISK

DTYPES have commas between them, for example float32,bfloat16. LAYOUT is TPxPPxEP; the first layout saves.
With DTYPE/HOST_SHARE, moments are bfloat16.

Rank 0 writes what it found to OUT_DIR/<first word>.json.
"""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import random  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import rl.checkpoint.store as store_module  # noqa: E402
from rl.checkpoint.contents import total_checksums  # noqa: E402
from rl.checkpoint.directory import CONFIG, LATEST, MANIFEST, STATE, complete, rank_file  # noqa: E402
from rl.checkpoint.shards import write_shards  # noqa: E402
from rl.checkpoint.store import CheckpointStore  # noqa: E402
from rl.config.options import ConfigError  # noqa: E402
from rl.config.schema import Checkpoint, Config, Model, Optimizer, Run, Training  # noqa: E402
from rl.data.batch import Batch  # noqa: E402
from rl.engines.engines import build_policy  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.runtime.device import Device  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.micro_batch_plans import plan_minibatch  # noqa: E402
from rl.training.optimizer import main_weights  # noqa: E402
from tests.ranks.training.megatron_groups import new_grid  # noqa: E402
from tools.hf_reference import random_batch  # noqa: E402

ADAM = dict(lr=1e-3, eps=1e-2)
"""The epsilon is larger than most gradients, which are clipped to a norm of 1. For example, with the default
of 1e-8 rounding decides the step of a weight with a gradient near 0."""


def trainer_of(model: str, layout: str, device: Device, dtype: str):
    tp, pp, ep = map(int, layout.split("x"))
    dtype, _, share = dtype.partition("/")
    smaller = dict(moments="bfloat16", host_share=float(share)) if share else {}
    optimizer = Optimizer(weight_decay=0.1, **ADAM, **smaller)
    training = Training(tp=tp, pp=pp, ep=ep, micro_batch_tokens=96, optimizer=optimizer)
    config = Config(model=Model(path=model, dtype=dtype), training=training)
    return build_policy(config, read_hf_config(model), new_grid(tp, pp, ep, training.expert_tp), device)


def update(trainer, batch: Batch) -> dict[str, float]:
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)

    def minus_logprobs(micro):
        loss = -micro.logprobs.sum() / len(batch)
        return loss, {"loss": loss}

    result = trainer.update(batch, plan, minus_logprobs, lr=ADAM["lr"])
    return result.metrics | {"grad_norm": result.grad_norm}


def logprobs(trainer, batch: Batch) -> torch.Tensor:
    plan = plan_minibatch(batch, list(range(len(batch))), dp=trainer.grid.dp, max_tokens=96)
    return trainer.forward(batch, [plan], ("logprobs",))[0]


def weights_of(trainer) -> dict:
    return {name: tensor.clone() for name, tensor in trainer.full_weights()}


def bytes_of_masters(trainer) -> int:
    """Device memory of the main weights of this rank."""
    return sum(main.untyped_storage().nbytes() for _, main, _ in main_weights(trainer.optimizer))


def furthest(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def layouts(device: Device, model: str, directory: str, dtypes: str, *names: str) -> dict:
    """Per dtype and layout, differences from the run that saved: absolute for weights and the next step,
    relative for log-probs, loss and norm. Of Adam, its options."""
    batch, found = random_batch(read_hf_config(model)["vocab_size"]), {"adam": ADAM}
    for dtype in dtypes.split(","):
        store = CheckpointStore(Config(run=Run(dir=f"{directory}/{dtype}")))
        trainer = trainer_of(model, names[0], device, dtype)
        for _ in range(2):
            update(trainer, batch)
        store.save(2, {"policy": trainer}, {})
        expected = weights_of(trainer), logprobs(trainer, batch), update(trainer, batch), weights_of(trainer)
        for layout in names:
            trainer = trainer_of(model, layout, device, dtype)
            empty = bytes_of_masters(trainer)
            store.load(store.newest(), {"policy": trainer}, seed=0)
            assert bytes_of_masters(trainer) == empty
            loaded, scored, metrics = weights_of(trainer), logprobs(trainer, batch), update(trainer, batch)
            moved = weights_of(trainer)
            found[f"{dtype} {layout}"] = {
                "weights": furthest(loaded, expected[0]),
                "logprobs": float((scored - expected[1]).abs().max() / expected[1].abs().max()),
                **{name: abs(metrics[name] / expected[2][name] - 1) for name in ("loss", "grad_norm")},
                "next weights": furthest(moved, expected[3]),
                "step": float(
                    (expected[3]["model.norm.weight"] - expected[0]["model.norm.weight"]).abs().max()
                ),
            }
    return found


def faults(device: Device, model: str, directory: str, other_model: str, small_disk: str) -> dict:
    """The effect of each fault: the step that was loaded or that is still there, or the text of an error."""
    batch, found = random_batch(read_hf_config(model)["vocab_size"]), {}
    trainer = trainer_of(model, "1x1x1", device, "float32")
    models = {"policy": trainer}

    def store_of(run_dir: str | Path, **options) -> CheckpointStore:
        return CheckpointStore(Config(run=Run(dir=str(run_dir)), checkpoint=Checkpoint(**options)))

    weights = {}
    whole = store_of(f"{directory}/whole", keep_last=0)
    for step in (1, 2, 3):
        update(trainer, batch)
        weights[step] = weights_of(trainer)
        draw()
        whole.save(step, models, {"place": step})
    drawn = draw()

    def outcome(run_dir: Path, **options) -> str | int:
        """The step from which a run in this directory continues, after a check of its weights; or the
        error."""
        store = store_of(run_dir, **options)
        try:
            saved = store.newest()
            if saved is None:
                return "none"
            state = store.load(saved, models, seed=0)
        except ConfigError as error:
            return str(error)
        assert furthest(weights_of(trainer), weights[saved.step]) == 0
        assert state.pop("checksums") == total_checksums(models)
        assert state == {"place": saved.step, "step": saved.step, "metrics": {}}
        return saved.step

    def after(name: str, harm: Callable[[Path], object], **options) -> None:
        """`harm` gets the directory of checkpoints of a copy of the run."""
        copy = Path(directory, name)
        if RANKS.rank == 0:
            shutil.copytree(f"{directory}/whole", copy)
            harm(copy / "checkpoints")
        dist.barrier()
        found[name] = outcome(copy, **options)

    newest, last = "step_000003", rank_file(1)
    found["whole"] = outcome(Path(directory, "whole"))
    found["random states return"] = drawn == draw()
    after("no latest", lambda path: (path / LATEST).unlink())
    after("truncated", lambda path: cut(path / newest / last))
    after("truncated, unverified", lambda path: cut(path / newest / last), verify=False)
    after("flipped bit", lambda path: flip(path / newest / last))
    after("missing file", lambda path: (path / newest / CONFIG).unlink())
    after("missing manifest", lambda path: (path / newest / MANIFEST).unlink())
    after("flipped manifest", lambda path: flip(path / newest / MANIFEST))
    after("brackets in the manifest", lambda path: (path / newest / MANIFEST).write_text("[" * 10**6))
    after("a directory as manifest", lambda path: in_place(path / newest / MANIFEST, Path.mkdir))
    after("EIO of the manifest", lambda path: in_place(path / newest / MANIFEST, fail_to_read))
    after("a directory as state", lambda path: in_place(path / newest / STATE, Path.mkdir), verify=False)
    after("a directory as tensors", lambda path: in_place(path / newest / last, Path.mkdir))
    after("brackets in a header", lambda path: brackets(path / newest / last), verify=False)
    after("a file as checkpoint", lambda path: in_place(path / newest, Path.touch))
    after("two damaged", lambda path: (cut(path / newest / last), flip(path / "step_000002" / last)))
    after("all damaged", lambda path: [flip(saved.path / last) for saved in complete(path)])
    after("of the future", lambda path: raise_format(path / newest))

    # When its step is saved again, a damaged checkpoint is renamed; it neither counts nor is it overwritten.
    store = store_of(f"{directory}/truncated", keep_last=2)
    assert store.newest().step == 2
    store.save(3, models, {})
    store.close()
    dist.barrier()
    found["set aside"] = sorted(path.name for path in Path(directory, "truncated", "checkpoints").iterdir())

    for name, path, dtype in (("other model", other_model, "float32"), ("other dtype", model, "bfloat16")):
        policy = trainer_of(path, "1x1x1", device, dtype)
        try:
            store_of(f"{directory}/whole").load(whole.newest(), {"policy": policy}, seed=0)
        except ConfigError as error:
            found[name] = str(error)

    new_grid(1, 1)
    assert outcome(Path(directory, "whole")) == 3
    if small_disk:
        found |= full_disk(Path(small_disk), store_of, models, outcome)

    store = store_of(f"{directory}/background", background=True)
    moved = threading.Event()
    store_module.write_shards = lambda path, *shards: moved.wait() and write_shards(path, *shards)
    store.save(3, models, {"place": 3})
    update(trainer, batch)  # must not affect the checkpoint that is being written
    moved.set()
    store.save(4, models, {})  # waits for the first
    found["background, before it is complete"] = [saved.step for saved in complete(store.directory)]
    while store.is_saving:
        store.poll()
    found["background"] = [saved.step for saved in complete(store.directory)]
    store = store_of(f"{directory}/background")
    weights[4] = weights_of(trainer)
    for saved in complete(store.directory):
        store.load(saved, models, seed=0)
        found[f"background, weights of {saved.step}"] = furthest(weights_of(trainer), weights[saved.step])
    return found


def full_disk(disk: Path, store_of, models, outcome) -> dict:
    """The disk is full while rank 1 writes; then there is too little space before anything is written."""
    found = {}
    store = store_of(disk)
    store.save(3, models, {"place": 3})
    free = shutil.disk_usage(disk).free
    fill = disk / "fill"
    for name, background in (("full while writing", False), ("full in the background", True)):
        store = store_of(disk, background=background)
        store.newest()
        # Other files fill the disk after the check.
        store._check_space = lambda save, mine: write_zeros(fill, free - 3 * mine // 2)
        try:
            store.save(5, models, {})
            store.finish()
        except ConfigError as error:
            found[name] = str(error)
        found[f"{name}: left"] = sorted(path.name for path in store.directory.iterdir())
    store = store_of(disk)
    try:
        store.save(5, models, {})
    except ConfigError as error:
        found["full before"] = str(error)
    found["full before: left"] = sorted(path.name for path in store.directory.iterdir())
    found["full: loaded"] = outcome(disk)
    return found


def write_zeros(path: Path, size: int) -> None:
    if RANKS.rank == 0:
        path.write_bytes(bytes(size))
    dist.barrier()


def draw() -> list:
    """The next numbers of every generator."""
    of_numpy = float(np.random.rand()), float(np.random.randn())
    return [random.random(), random.gauss(), *of_numpy, float(torch.rand(1))]


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-len(content) // 3] ^= 4
    path.write_bytes(content)


def in_place(path: Path, make: Callable[[Path], object]) -> None:
    """Put what `make` makes in the place of a file or directory."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


def fail_to_read(path: Path) -> None:
    """Make a file that the system cannot read: its first byte raises EIO."""
    path.symlink_to("/proc/self/mem")


def brackets(path: Path) -> None:
    """Replace a file's header by brackets that no parser nests, and keep the file's size."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    path.write_bytes(content[:8] + b"[" * size + content[8 + size :])


def raise_format(path: Path) -> None:
    from rl.checkpoint import directory as on_disk

    manifest = on_disk.read_manifest(path)
    partial = path.with_suffix(".partial")
    shutil.copytree(path, partial)
    on_disk.commit(partial, path, manifest | {"format": on_disk.FORMAT + 1})


def main(what: str, *arguments: str) -> None:
    with session(RANKS) as device:
        found = {"layouts": layouts, "faults": faults}[what](device, *arguments)
        if RANKS.rank == 0:
            Path(arguments[1], f"{what}.json").write_text(json.dumps(found, indent=1))
        dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
