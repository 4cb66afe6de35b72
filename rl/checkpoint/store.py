"""Checkpoints of a run: saved by all ranks at once, found, verified and loaded in any layout.

Each rank writes one file with what it alone holds (`contents`), in the foreground or by a thread of its own. Rank 0 then makes
the directory a checkpoint (`directory`). docs/checkpoints.md says what each failure does.

Why not Megatron's dist_checkpointing: its torch_dist format keeps the index in a pickle, gathers the optimizer of a data
parallel group on one rank to make it free of the layout, cannot load the optimizer of experts with another ep, and forks its
writers from a process that runs vLLM's and gloo's threads.
"""

import errno
import itertools
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from rl.checkpoint import directory as on_disk
from rl.checkpoint.contents import describe, load_optimizer, load_weights, model_shards
from rl.checkpoint.directory import Saved
from rl.checkpoint.rng import reseed_rng, restore_rng, rng_shards
from rl.checkpoint.shards import (
    DamagedError,
    Shard,
    ShardReader,
    Written,
    check_file,
    in_file_order,
    num_bytes,
    read_index,
    write_shards,
)
from rl.checkpoint.snapshot import Snapshot
from rl.config.options import ConfigError, to_yaml
from rl.config.schema import Config
from rl.faults.agreement import fail_together
from rl.run_directory.record import versions
from rl.runtime.collectives import broadcast_object, gather_objects
from rl.training.engine import TrainingEngine

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GIB = 1 << 30

T = TypeVar("T")


class CheckpointStore:
    """The checkpoints of one run directory. Public methods are collective over the world unless they say otherwise."""

    def __init__(self, config: Config, *, fence: Callable[[], None] = lambda: None):
        """fence: called on rank 0 before a checkpoint is begun and before it is made current; what it raises ends the save."""
        self.config, self._fence = config, fence
        self.directory = Path(config.run.dir, "checkpoints")
        self._damaged: list[Saved] = []
        self._snapshot = Snapshot()
        self._save: _Save | None = None
        """In the background."""
        self._removal: threading.Thread | None = None
        """Of what retention gave up, on rank 0."""
        self._last_step: int | None = None
        """Of the newest checkpoint that is written or being written."""
        self.complete_step: int | None = None
        """Of the newest that this store has completed."""

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        models: Mapping[str, TrainingEngine],
        state: Mapping,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write the checkpoint of a step; nothing to do if it has been. `state` is plain data and `metrics` the step's, both
        alike on every rank. With checkpoint.background it returns when everything is copied; `poll` and `finish` then see
        to the rest.

        Raises ConfigError, on every rank alike, if it cannot be written; what was written of it is removed and older
        checkpoints are as they were.
        """
        self.finish()
        if step == self._last_step:
            return
        shards = in_file_order(
            [
                *rng_shards(dist.get_rank()),
                *itertools.chain.from_iterable(model_shards(*item) for item in models.items()),
            ]
        )
        metrics = {
            name: value if type(value) is int else float(value) for name, value in (metrics or {}).items()
        }
        state = {**state, "metrics": metrics}
        save = _Save(
            step, self.directory / f"step_{step:06d}.partial", self._manifest(step, models, metrics), state
        )
        with fail_together():
            if dist.get_rank() == 0:
                self._fence()
                self._make_room_for(save)
        self._check_space(save, num_bytes(shards))
        self._last_step = step
        if self.config.checkpoint.background:
            save.start(self._snapshot.take(shards))
            self._save = save
        else:
            save.write(shards)
            self._complete(save)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background; alike on every rank. Not collective."""
        return self._save is not None

    def poll(self) -> None:
        """Between two steps: complete a checkpoint that all ranks have written in the background. Raises as `save` does."""
        if self._save is not None:
            done = torch.tensor(int(self._save.is_written))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done:
                self.finish()

    def finish(self) -> None:
        """Wait for a checkpoint that is being written in the background, and complete it. Raises as `save` does."""
        save, self._save = self._save, None
        if save is not None:
            save.wait()
            self._complete(save)

    def close(self) -> None:
        """`finish`, and wait for the files of checkpoints that are no longer kept to be gone."""
        self.finish()
        self._wait_for_removal()

    def _wait_for_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()

    def _make_room_for(self, save: "_Save") -> None:
        self._wait_for_removal()
        self.directory.mkdir(parents=True, exist_ok=True)
        on_disk.clear_leftovers(self.directory)
        for saved in self._damaged:
            on_disk.set_aside(saved.path)
        self._damaged.clear()
        save.partial.mkdir()

    def _check_space(self, save: "_Save", mine: int) -> None:
        """Every rank sees the file system that it will write to; together they need the sum."""
        everyone = gather_objects((mine, shutil.disk_usage(self.directory).free))
        needed, free = sum(size for size, _ in everyone), min(free for _, free in everyone)
        if needed > free:
            save.give_up()
            raise ConfigError(
                f"the checkpoint of step {save.step} needs {needed / GIB:.3f} GiB, but {self.directory} has {free / GIB:.3f} GiB "
                f"free. {self._still_there()}"
            )

    def _complete(self, save: "_Save") -> None:
        """The commit: what all ranks wrote becomes the newest checkpoint, and others go."""
        everyone = gather_objects((save.written, save.problem))
        problems = {rank: problem for rank, (_, problem) in enumerate(everyone) if problem is not None}
        if problems:
            save.give_up()
            rank = min(problems)
            raise ConfigError(
                f"the checkpoint of step {save.step} could not be written by rank {rank}: {problems[rank]}. {self._still_there()}"
            )
        with fail_together():
            if dist.get_rank() == 0:
                self._fence()
                try:
                    self._commit(
                        save, {on_disk.rank_file(rank): written for rank, (written, _) in enumerate(everyone)}
                    )
                except OSError as error:
                    shutil.rmtree(save.partial, ignore_errors=True)
                    raise ConfigError(
                        f"the checkpoint of step {save.step} could not be written: {_in_words(error)}. {self._still_there()}"
                    )
        self.complete_step = save.step

    def _commit(self, save: "_Save", files: dict[str, Written]) -> None:
        files[on_disk.STATE] = on_disk.write_text(save.partial / on_disk.STATE, json.dumps(save.state) + "\n")
        files[on_disk.CONFIG] = on_disk.write_text(save.partial / on_disk.CONFIG, to_yaml(self.config))
        save.manifest["files"] = {
            name: {"bytes": file.bytes, "crc32": file.crc32} for name, file in files.items()
        }
        on_disk.commit(save.partial, save.partial.with_suffix(""), save.manifest)
        options = self.config.checkpoint
        found = on_disk.complete(self.directory)
        if options.keep_best:
            found = on_disk.with_metrics(found, options.best_metric)
        keep = on_disk.kept(
            found,
            last=options.keep_last,
            every=options.keep_every,
            best=options.keep_best,
            highest=options.best_is == "highest",
        )
        retired = [on_disk.retire(saved.path) for saved in found if saved.step not in keep]
        # Freeing gigabytes takes a file system seconds, for which nobody has to wait.
        self._removal = threading.Thread(target=_remove, args=(retired,), name="removal", daemon=True)
        self._removal.start()

    def _manifest(
        self, step: int, models: Mapping[str, TrainingEngine], metrics: Mapping[str, float]
    ) -> dict:
        if dist.get_rank() > 0:
            return {}
        best = self.config.checkpoint.best_metric
        return {
            "format": on_disk.FORMAT,
            "step": step,
            "algorithm": self.config.algorithm,
            "layout": layout_of(models),
            **versions(),
            "metrics": {best: metrics[best]} if math.isfinite(metrics.get(best, math.nan)) else {},
            "models": {name: describe(model) for name, model in models.items()},
        }

    def _still_there(self) -> str:
        """What a user has when a save failed, and what to do. Not collective."""
        found = on_disk.complete(self.directory)
        newest = (
            f"The newest checkpoint, {found[-1].path.name}, is as it was"
            if found
            else "There is no older checkpoint"
        )
        return f"{newest}; make room (checkpoint.keep_last keeps fewer) and start the same command again."

    # Finding ----------------------------------------------------------------------------------------------------------

    def newest(self) -> Saved | None:
        """The newest checkpoint of this run whose files are those that were written; a damaged one is said, and the one before
        it taken. None if there is none at all.

        Raises ConfigError, on every rank alike, if all are damaged, or for a format newer than this code.
        """
        return self._newest_in(self.directory)

    def named(self, path: str) -> Saved:
        """The checkpoint that checkpoint.resume names: itself, or the newest of another run's directory. Raises as `newest`
        does, and if there is none."""
        start = Path(path)
        if _of_first_rank(lambda: (start / on_disk.MANIFEST).exists()):
            problem = self._damage(start)
            if problem is not None:
                raise ConfigError(f"checkpoint.resume={path} cannot be used: {problem}.")
            return Saved(_of_first_rank(lambda: on_disk.read_manifest(start))["step"], start)
        saved = self._newest_in(start / "checkpoints")
        if saved is None:
            raise ConfigError(
                f"checkpoint.resume={path} is no checkpoint and no directory of a run that has one; "
                "name either, or use auto to go on with run.dir's own."
            )
        return saved

    def _newest_in(self, directory: Path) -> Saved | None:
        problem, own = None, directory == self.directory
        for saved in reversed(_of_first_rank(lambda: on_disk.complete(directory))):
            problem = self._damage(saved.path)
            if problem is None:
                self._last_step = saved.step if own else self._last_step
                return saved
            log.warning("%s; looking at the checkpoint before it", problem)
            if own:
                self._damaged.append(saved)
        if problem is not None:
            raise ConfigError(
                f"no checkpoint in {directory} is whole (of the oldest: {problem}). Restore one from a copy, or start anew with "
                "another run.dir."
            )
        return None

    def _damage(self, path: Path) -> str | None:
        """What is wrong with a checkpoint, or None. Each rank looks at a share of its files."""
        try:
            manifest = _of_first_rank(lambda: on_disk.read_manifest(path))
        except DamagedError as error:
            return str(error)
        files = sorted(on_disk.expected_files(manifest).items())
        problem = None
        with fail_together():
            try:
                for name, written in files[dist.get_rank() :: dist.get_world_size()]:
                    check_file(path / name, written, contents=self.config.checkpoint.verify)
            except DamagedError as error:
                problem = str(error)
        return next((said for said in gather_objects(problem) if said is not None), None)

    # Loading ----------------------------------------------------------------------------------------------------------

    def load(self, saved: Saved, models: Mapping[str, TrainingEngine], *, seed: int) -> dict:
        """Load weights and optimizer of each model and the states of the random generators; in another world or layout those
        are made from `seed`. Returns the state that was saved, with `step` and its `metrics`.

        Raises ConfigError, on every rank alike, for a checkpoint of other models.
        """
        manifest = _of_first_rank(lambda: on_disk.read_manifest(saved.path))
        _check_models(saved.path, manifest, models)
        reader = _reader(saved.path, manifest)
        with fail_together():
            for name, model in models.items():
                load_optimizer(name, model, reader, manifest["models"][name]["optimizer_step"])
                load_weights(name, model, reader)
        then, now = manifest["layout"], layout_of(models)
        if then == now:
            restore_rng(reader, dist.get_rank())
        else:
            changed = ", ".join(f"{key} {then[key]} -> {now[key]}" for key in now if then[key] != now[key])
            log.info(
                "another layout than the checkpoint's (%s): the states of the random generators are new ones",
                changed,
            )
            reseed_rng(seed)
        state = _of_first_rank(lambda: json.loads((saved.path / on_disk.STATE).read_text()))
        return state | {"step": manifest["step"]}

    def load_weights(self, saved: Saved, models: Mapping[str, TrainingEngine]) -> None:
        """Load the weights of the models and nothing else, in their own dtype; they need no optimizer. A checkpoint may lack
        any but the policy, which then stays as it is. Raises as `load`."""
        manifest = _of_first_rank(lambda: on_disk.read_manifest(saved.path))
        models = {name: model for name, model in models.items() if name in ("policy", *manifest["models"])}
        _check_models(saved.path, manifest, models, any_dtype=True)
        reader = _reader(saved.path, manifest)
        with fail_together():
            for name, model in models.items():
                load_weights(name, model, reader)


@dataclass(eq=False)
class _Save:
    """One rank's part of a checkpoint that is being written."""

    step: int
    partial: Path
    manifest: dict
    """Without its files. Empty on other ranks than the first."""
    state: dict
    written: Written | None = None
    problem: str | None = None

    def write(self, shards: Sequence[Shard]) -> None:
        """Not collective, as it runs in a thread; a failure is kept for all ranks to hear of it at the commit."""
        try:
            self.written = write_shards(self.partial / on_disk.rank_file(dist.get_rank()), shards)
        except OSError as error:
            self.problem = _in_words(error)

    def start(self, shards: Sequence[Shard]) -> None:
        # A daemon: a run that fails meanwhile need not wait for a file that nobody will complete.
        self._thread = threading.Thread(target=self.write, args=(shards,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self.written is None and self.problem is None:
            self.problem = "its thread ended with an error, which it has printed"

    def give_up(self) -> None:
        """Remove what was written. Collective over the world."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.partial, ignore_errors=True)


def layout_of(models: Mapping[str, TrainingEngine]) -> dict:
    """Where ranks stand; the states of random generators have a meaning only there."""
    engine = next(iter(models.values()))
    grid = engine.grid
    sizes = {name: getattr(grid, name) for name in ("tp", "pp", "ep", "etp")}
    return {"world_size": dist.get_world_size(), **sizes, "device": engine.device.torch.type}


def _check_models(
    path: Path, manifest: Mapping, models: Mapping[str, TrainingEngine], *, any_dtype: bool = False
) -> None:
    """ConfigError for models that are not those of the checkpoint."""
    for name, model in models.items():
        saved = manifest["models"].get(name)
        if saved is None:
            has = ", ".join(manifest["models"])
            raise ConfigError(
                f"{path} has no {name}, only {has}: it was written by another algorithm; use another run.dir."
            )
        shapes = {
            hf: list(shape)
            for weight in model.weight_map.weights
            for hf, shape in zip(weight.hf, weight.shapes)
        }
        for hf in sorted(shapes.keys() | saved["tensors"].keys()):
            there, here = saved["tensors"].get(hf, "absent"), shapes.get(hf, "absent")
            if there != here:
                raise ConfigError(
                    f"{path} is a checkpoint of another {name}: {hf} is {there} there and {here} here; "
                    "use that run's model.path, or another run.dir."
                )
        dtype = str(model.weight_map.dtype).removeprefix("torch.")
        if saved["dtype"] != dtype and not any_dtype:
            raise ConfigError(
                f"{path} was written with model.dtype={saved['dtype']}, not {dtype}; use that, or start from its weights "
                f"alone with checkpoint.resume={path} checkpoint.weights_only=true and another run.dir."
            )


def _reader(path: Path, manifest: Mapping) -> ShardReader:
    """Collective over the world: each rank reads the headers of a share of the files."""
    files = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
    index: dict = {}
    with fail_together():
        mine = read_index(path, files[dist.get_rank() :: dist.get_world_size()])
    for theirs in gather_objects(mine):
        for name, stored in theirs.items():
            index.setdefault(name, []).extend(stored)
    return ShardReader(path, index)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        shutil.rmtree(
            path, ignore_errors=True
        )  # what stays is for the next save to remove, and to complain of


def _of_first_rank(read: Callable[[], T]) -> T:
    """What rank 0 reads, or raises (DamagedError, ConfigError, OSError), on every rank. Collective over the world."""
    out: list = [None, None]
    if dist.get_rank() == 0:
        try:
            out[0] = read()
        except (DamagedError, ConfigError) as error:
            out[1] = error
        except OSError as error:
            out[1] = ConfigError(str(error))
    value, error = broadcast_object(out)
    if error is not None:
        raise error
    return value


def _in_words(error: OSError) -> str:
    return f"the disk, or your share of it, is full ({error})" if error.errno in FULL else str(error)
