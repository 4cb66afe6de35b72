"""Checkpoints of a run: save, find, verify and load them, in any layout.

Each rank writes its share into one file (`contents`), in the foreground or in a thread. Rank 0 then commits
the directory (`directory`). docs/checkpoints.md lists the effect of each failure.

Megatron's dist_checkpointing is not used, for four reasons. Its torch_dist format pickles the index. To be
independent of the layout, it gathers the optimizer of a data parallel group on one rank. It cannot load the
optimizer of experts with another ep. It forks its writers from a process with threads of vLLM and gloo.
"""

import errno
import itertools
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
import yaml

from rl.checkpoint import directory as on_disk
from rl.checkpoint.arrays import array_shards, restore_arrays, without_arrays
from rl.checkpoint.contents import (
    BASE,
    REFERENCE,
    describe,
    in_words,
    load_optimizer,
    load_weights,
    model_shards,
    total_checksums,
)
from rl.checkpoint.directory import Saved
from rl.checkpoint.rng import reseed_rng, restore_rng, rng_shards
from rl.checkpoint.shards import (
    DamagedError,
    Shard,
    ShardReader,
    StoredBox,
    Written,
    check_file,
    in_file_order,
    num_bytes,
    read_index,
    write_shards,
)
from rl.checkpoint.snapshot import Snapshot
from rl.checkpoint.start import check_complete
from rl.config.options import ConfigError, to_yaml
from rl.config.schema import Config
from rl.faults.agreement import fail_together
from rl.models.by_class import MARK
from rl.run_directory.record import versions
from rl.runtime import tracing
from rl.runtime.collectives import broadcast_object, gather_objects
from rl.training.engine import TrainingEngine

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
GIB = 1 << 30

T = TypeVar("T")


class WronglyLoaded(RuntimeError):
    """Raised on every rank if the loaded models differ from the saved models."""


class CheckpointStore:
    """The checkpoints of one run directory.

    Methods are collective over the world unless they say otherwise.
    """

    def __init__(self, config: Config, *, fence: Callable[[], None] = lambda: None):
        """Open the store of the config's run directory.

        fence: called on rank 0 before a save begins, is committed or is abandoned; an exception from it
        ends the save.
        """
        self.config, self._fence = config, fence
        self.directory = Path(config.run.dir, "checkpoints")
        self._damaged: list[Saved] = []
        self._snapshot = Snapshot()
        self._save: _Save | None = None
        """The save in the background."""
        self._removal: threading.Thread | None = None
        """On rank 0, the thread that removes retired checkpoints."""
        self._last_step: int | None = None
        """Step of the newest checkpoint that is written or being written."""
        self.complete_step: int | None = None
        """Step of the newest checkpoint that this store completed."""

    # Saving -------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        models: Mapping[str, TrainingEngine],
        state: Mapping,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write the checkpoint of a step, unless it exists.

        With checkpoint.background, return once everything is copied; `poll` and `finish` complete the save.

        state: plain data and arrays of one dimension. metrics: metrics of the step. Both are identical on all
        ranks. Raises ConfigError on every rank if the checkpoint cannot be written; the incomplete checkpoint
        is removed and older checkpoints stay. Raises WronglySaved on every rank if it would lack a number.
        """
        self.finish()
        if step == self._last_step:
            return
        check_complete(models)
        of_models = itertools.chain.from_iterable(model_shards(*item) for item in models.items())
        arrays = array_shards(state) if dist.get_rank() == 0 else ()
        shards = in_file_order([*rng_shards(dist.get_rank()), *of_models, *arrays])
        plain = {
            name: value if type(value) is int else float(value) for name, value in (metrics or {}).items()
        }
        partial = self.directory / on_disk.partial_name(step)
        plain_state = without_arrays(state) | {"metrics": plain}
        sums = total_checksums(models)
        save = _Save(step, partial, self._manifest(step, models, plain, sums), plain_state)
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
            save.write(shards, self._snapshot.in_turn(shards))
            self._complete(save)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background; identical on all ranks. Not collective."""
        return self._save is not None

    def poll(self) -> None:
        """Complete the background save if all ranks have written it. Call it between steps.

        Raises as `save` does.
        """
        if self._save is not None:
            done = torch.tensor(int(self._save.is_written))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done:
                self.finish()

    def finish(self) -> None:
        """Wait for the background save and complete it. Raises as `save` does."""
        save, self._save = self._save, None
        if save is not None:
            save.wait()
            self._complete(save)

    def close(self) -> None:
        """Call `finish`, and wait until the files of retired checkpoints are removed."""
        self.finish()
        self._wait_for_removal()

    def _wait_for_removal(self) -> None:
        if self._removal is not None:
            self._removal.join()

    def _make_room_for(self, save: "_Save") -> None:
        self._wait_for_removal()
        self.directory.mkdir(mode=0o770, parents=True, exist_ok=True)
        on_disk.clear_leftovers(self.directory)
        for saved in self._damaged:
            on_disk.set_aside(saved.path)
        self._damaged.clear()
        save.partial.mkdir()

    def _check_space(self, save: "_Save", mine: int) -> None:
        """Raise ConfigError if the ranks together need more space than is free.

        Ranks may see different amounts of free space; the smallest counts.
        """
        everyone = gather_objects((mine, shutil.disk_usage(self.directory).free))
        needed, free = sum(size for size, _ in everyone), min(free for _, free in everyone)
        if needed > free:
            self._give_up(save)
            raise ConfigError(
                f"the checkpoint of step {save.step} needs {needed / GIB:.3f} GiB, but {self.directory} has "
                f"{free / GIB:.3f} GiB free. {self._advice()}"
            )

    def _give_up(self, save: "_Save") -> None:
        with fail_together():
            if dist.get_rank() == 0:
                self._fence()
        save.give_up()

    def _complete(self, save: "_Save") -> None:
        """Commit the directory as the newest checkpoint, and apply retention."""
        everyone = gather_objects((save.written, save.problem), types=(Written,))
        for rank, (_, problem) in enumerate(everyone):
            if problem is not None:
                self._give_up(save)
                raise ConfigError(
                    f"the checkpoint of step {save.step} could not be written by rank {rank}: {problem}. "
                    f"{self._advice()}"
                )
        with fail_together():
            if dist.get_rank() == 0:
                self._fence()
                files: dict[str, Written] = {}
                for rank, (written, _) in enumerate(everyone):
                    assert written is not None  # without a problem a rank has written its file
                    files[on_disk.rank_file(rank)] = written
                try:
                    self._commit(save, files)
                except OSError as error:
                    shutil.rmtree(save.partial, ignore_errors=True)
                    raise ConfigError(
                        f"the checkpoint of step {save.step} could not be written: {_in_words(error)}. "
                        f"{self._advice()}"
                    ) from error
        self.complete_step = save.step

    def _commit(self, save: "_Save", files: dict[str, Written]) -> None:
        files[on_disk.STATE] = on_disk.write_text(save.partial / on_disk.STATE, json.dumps(save.state) + "\n")
        files[on_disk.CONFIG] = on_disk.write_text(save.partial / on_disk.CONFIG, to_yaml(self.config))
        save.manifest["files"] = {name: asdict(file) for name, file in files.items()}
        on_disk.commit(save.partial, self.directory / f"step_{save.step:06d}", save.manifest)
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
        # A file system needs seconds to free gigabytes.
        self._removal = threading.Thread(target=_remove, args=(retired,), name="removal", daemon=True)
        self._removal.start()

    def _manifest(
        self,
        step: int,
        models: Mapping[str, TrainingEngine],
        metrics: Mapping[str, float],
        sums: dict[str, int],
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
            "checksums": sums,
        }

    def _advice(self) -> str:
        """Return the advice after a failed save. Not collective."""
        found = on_disk.complete(self.directory)
        newest = (
            f"{found[-1].path.name} is still the newest checkpoint"
            if found
            else "There is no older checkpoint"
        )
        return f"{newest}; free space (or lower checkpoint.keep_last) and start the same command again."

    # Finding ------------------------------------------------------------------------------------------------

    def newest(self) -> Saved | None:
        """Return the newest intact checkpoint of this run, or None if the run has no checkpoint.

        A damaged checkpoint is logged and the previous one is used.

        Raises ConfigError on every rank if all checkpoints are damaged, or if the format of one is newer than
        this code can read.
        """
        return self._newest_in(self.directory)

    def named(self, path: str) -> Saved:
        """Return the checkpoint that the path in checkpoint.resume names.

        If the path names a run directory, the newest checkpoint of that run is returned. Raises as `newest`
        does, and ConfigError if there is no checkpoint.
        """
        start = Path(path)
        if _read_on_rank_0(lambda: (start / on_disk.MANIFEST).exists()):
            problem = self._damage(start)
            if problem is not None:
                raise ConfigError(
                    f"{path} cannot be loaded: {problem}; copy it again, or name another in "
                    "checkpoint.resume."
                )
            return Saved(_read_on_rank_0(lambda: on_disk.read_manifest(start))["step"], start)
        saved = self._newest_in(start / "checkpoints")
        if saved is None:
            raise ConfigError(
                f"checkpoint.resume={path} is neither a checkpoint nor the directory of a run with one; "
                "name either, or use auto to continue in run.dir, or never to begin at step 0."
            )
        return saved

    def config_of(self, saved: Saved) -> dict:
        """Return the config of the start that wrote a checkpoint."""
        return yaml.safe_load(_read_on_rank_0(lambda: (saved.path / on_disk.CONFIG).read_text()))

    def _newest_in(self, directory: Path) -> Saved | None:
        problem, own = None, directory == self.directory
        for saved in reversed(_read_on_rank_0(lambda: on_disk.complete(directory))):
            problem = self._damage(saved.path)
            if problem is None:
                self._last_step = saved.step if own else self._last_step
                return saved
            log.warning("%s; trying the previous checkpoint", problem)
            if own:
                self._damaged.append(saved)
        if problem is not None:
            raise ConfigError(
                f"all checkpoints in {directory} are damaged (the oldest: {problem}). Restore one from a "
                "copy, or train again with another run.dir."
            )
        return None

    def _damage(self, path: Path) -> str | None:
        """Return the problem of a damaged checkpoint, or None if it is intact.

        Collective over the world; each rank checks a share of the files.
        """
        try:
            manifest = _read_on_rank_0(lambda: on_disk.read_manifest(path))
        except DamagedError as error:
            return str(error)
        files = sorted(on_disk.expected_files(manifest).items())
        problem = None
        with fail_together():
            try:
                for name, written in files[dist.get_rank() :: dist.get_world_size()]:
                    is_small = not name.endswith(".safetensors")
                    check_file(path / name, written, contents=is_small or self.config.checkpoint.verify)
            except DamagedError as error:
                problem = str(error)
        return next((text for text in gather_objects(problem) if text is not None), None)

    # Loading ------------------------------------------------------------------------------------------------

    def load(self, saved: Saved, models: Mapping[str, TrainingEngine], *, seed: int) -> dict:
        """Load weights, optimizer and random states.

        Returns the saved state with `step`, `metrics` and `checksums`, those of the saved models.

        In another world or layout, the random states are derived from `seed` instead.

        Raises ConfigError on every rank for a checkpoint of other models, and WronglyLoaded if the loaded
        models differ from the saved models.
        """
        manifest = _read_on_rank_0(lambda: on_disk.read_manifest(saved.path))
        _check_models(saved.path, manifest, models)
        reader = _reader(saved.path, manifest)
        with fail_together():
            for name, model in models.items():
                load_optimizer(name, model, reader, manifest["models"][name]["optimizer_step"])
                load_weights(name, model, reader)
        _check_loaded(saved.path, manifest["checksums"], models)
        for name, model in models.items():
            there, here = (facts["optimizer_step"] for facts in (manifest["models"][name], describe(model)))
            if there != here:
                raise WronglyLoaded(
                    f"after loading {saved.path}, the optimizer of the {name} counts {here} steps instead of "
                    f"{there}; Adam's bias correction would be wrong."
                )
        then, now = manifest["layout"], layout_of(models)
        if then == now:
            restore_rng(reader, dist.get_rank())
        else:
            is_class = any(model.weight_map.hf.get(MARK) for model in models.values())
            keys = {key: "training.shard" if is_class and key == "etp" else key for key in now}
            changed = ", ".join(f"{keys[k]} {then[k]} -> {now[k]}" for k in now if then[k] != now[k])
            log.info(
                "the layout differs from the checkpoint's (%s); random states are derived from the seed",
                changed,
            )
            reseed_rng(seed)
        state = _read_on_rank_0(lambda: _read_state(saved.path, reader))
        return state | {"step": manifest["step"], "checksums": manifest["checksums"]}

    def load_weights(self, saved: Saved, models: Mapping[str, TrainingEngine]) -> None:
        """Load only the weights of the models, in the models' own dtype; no optimizer is needed.

        If the checkpoint lacks a model other than the policy, this model stays unchanged. Raises as `load`
        does; after the load, only the base weights of adapters are compared.
        """
        manifest = _read_on_rank_0(lambda: on_disk.read_manifest(saved.path))
        models = {name: model for name, model in models.items() if name in ("policy", *manifest["models"])}
        _check_models(saved.path, manifest, models, any_dtype=True)
        reader = _reader(saved.path, manifest)
        with fail_together():
            for name, model in models.items():
                load_weights(name, model, reader)
        same = {
            name
            for name, model in models.items()
            if manifest["models"][name]["dtype"] == describe(model)["dtype"]
        }
        bases = {
            name: value
            for name, value in manifest["checksums"].items()
            if name.split("/")[0] in same and name.split("/")[1] == BASE
        }
        if bases:
            _check_loaded(saved.path, bases, models)


@dataclass(eq=False)
class _Save:
    """One rank's part of a save."""

    step: int
    partial: Path
    manifest: dict
    """The manifest without its files, on rank 0; empty on other ranks."""
    state: dict
    written: Written | None = None
    problem: str | None = None

    def write(self, shards: Sequence[Shard], copies: Iterable[Shard] | None = None) -> None:
        """Write this rank's file. Not collective, because it may run in a thread.

        The commit reports a failure to all ranks. copies: as in `write_shards`.
        """
        try:
            with tracing.span("write the checkpoint", step=self.step):
                path = self.partial / on_disk.rank_file(dist.get_rank())
                self.written = write_shards(path, shards, copies)
        except OSError as error:
            self.problem = _in_words(error)

    def start(self, shards: Sequence[Shard]) -> None:
        # A daemon thread does not delay the exit of a run that fails during the save.
        self._thread = threading.Thread(target=self.write, args=(shards,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self.written is None and self.problem is None:
            self.problem = "its thread raised an exception, printed above"

    def give_up(self) -> None:
        """Remove the incomplete checkpoint. Collective over the world."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.partial, ignore_errors=True)


def layout_of(models: Mapping[str, TrainingEngine]) -> dict:
    """Return the layout of the ranks. Saved random states are valid only in the same layout."""
    engine = next(iter(models.values()))
    grid = engine.grid
    sizes = {name: getattr(grid, name) for name in ("tp", "cp", "pp", "ep", "etp")}
    return {"world_size": dist.get_world_size(), **sizes, "device": engine.device.torch.type}


def _check_models(
    path: Path, manifest: Mapping, models: Mapping[str, TrainingEngine], *, any_dtype: bool = False
) -> None:
    """Raise ConfigError unless the checkpoint holds these models."""
    for name, model in models.items():
        saved = manifest["models"].get(name)
        if saved is None:
            has = ", ".join(manifest["models"])
            raise ConfigError(
                f"{path} has no {name}, only {has}: another algorithm wrote it; use another run.dir."
            )
        own = describe(model)
        if saved["adapter"] != own["adapter"]:
            there, here = (_adapter_in_words(facts["adapter"]) for facts in (saved, own))
            raise ConfigError(
                f"{path} was written with {there}, not {here}; use the "
                "section adapter of that run, or another run.dir and its export as model.path "
                "(`lockstep export`)."
            )
        for hf in sorted(own["tensors"].keys() | saved["tensors"].keys()):
            there, here = (facts["tensors"].get(hf, "absent") for facts in (saved, own))
            if there != here:
                raise ConfigError(
                    f"{path} is a checkpoint of another {name}: {hf} is {there} there and {here} here; "
                    "use that run's model.path, or another run.dir."
                )
        for key, setting in () if any_dtype else (("dtype", "model.dtype"), ("moments", "optimizer.moments")):
            there, here = saved[key], own[key]
            if there and here and there != here:  # a frozen model has no moments
                raise ConfigError(
                    f"{path} was written with {setting}={there} of the {name}, not {here}; use that dtype, "
                    f"or load only its weights with checkpoint.resume={path} checkpoint.weights_only=true "
                    "and another run.dir."
                )


def _adapter_in_words(adapter: Mapping) -> str:
    return " ".join(f"adapter.{key}={value}" for key, value in adapter.items()) or "adapter.kind=none"


def _check_loaded(path: Path, saved: Mapping[str, int], models: Mapping[str, TrainingEngine]) -> None:
    """Raise WronglyLoaded on every rank if a tensor differs from the saved one.

    A reference policy that only one of the two runs keeps is not compared. Collective over the world.
    """
    loaded = total_checksums(models)
    kept = {f"{name}/{REFERENCE}/" for name, model in models.items() if model.reference is not None}
    wrong = [
        name
        for name, value in saved.items()
        if loaded.get(name) != value and (name.split("/")[1] != REFERENCE or name.startswith(tuple(kept)))
    ]
    if not wrong:
        return
    tensors, where = in_words(wrong, models)
    part = wrong[0].split("/")[1]
    remedy = "; use the model.path that the run started with" if part in (REFERENCE, BASE) else ""
    raise WronglyLoaded(f"after loading {path}, {tensors} are not what was saved, on {where}{remedy}.")


def _reader(path: Path, manifest: Mapping) -> ShardReader:
    """Return a reader of all files. Collective over the world; each rank reads a share of the headers."""
    files = sorted(name for name in manifest["files"] if name.endswith(".safetensors"))
    index: dict = {}
    with fail_together():
        mine = read_index(path, files[dist.get_rank() :: dist.get_world_size()])
    for theirs in gather_objects(mine, types=(StoredBox,)):
        for name, stored in theirs.items():
            index.setdefault(name, []).extend(stored)
    return ShardReader(path, index)


def _read_state(path: Path, reader: ShardReader) -> dict:
    state = json.loads((path / on_disk.STATE).read_text())
    restore_arrays(state, reader)
    return state


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)  # the next save removes the rest, or raises


def _read_on_rank_0(read: Callable[[], T]) -> T:
    """Return on every rank what rank 0 reads, or raise its error on every rank. Collective over the world.

    An error other than DamagedError is raised as ConfigError.
    """
    value, damage, problem = None, None, None
    if dist.get_rank() == 0:
        try:
            value = read()
        except DamagedError as error:
            damage = str(error)
        except (ConfigError, OSError) as error:
            problem = str(error)
        except Exception as error:  # the other ranks wait for the broadcast below
            problem = f"{type(error).__name__}: {error}"
    value, damage, problem = broadcast_object((value, damage, problem), types=(Saved,))
    if damage is not None:
        raise DamagedError(damage)
    if problem is not None:
        raise ConfigError(problem)
    return cast(T, value)


def _in_words(error: OSError) -> str:
    return f"the disk or the quota is full ({error})" if error.errno in FULL else str(error)
