"""Write the policy as a Hugging Face checkpoint directory that transformers and vLLM load."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from rl.checkpoint.contents import exported_checksums
from rl.config.options import ConfigError
from rl.models import as_written
from rl.models.boxes import whole
from rl.models.files import TensorReader, as_stored, save_tensors, stored_shapes
from rl.models.layout import Weight
from rl.models.sizes import PREDICTING
from rl.runtime.checksum import placed_checksum
from rl.runtime.collectives import broadcast_object
from rl.training.engine import TrainingEngine
from rl.training.weights import WeightMap

T = TypeVar("T")


class WronglyExported(RuntimeError):
    """Raised on every rank if a written tensor differs from the model's."""


class NewDirectory:
    """A directory that rank 0 writes as `partial` and renames at the end.

    Methods are collective over the world, except `attempt`. fence: see `export_hf`.
    """

    def __init__(self, target: str, fence: Callable[[], None]):
        self.target, self._fence = Path(target), fence
        # Path drops a slash at the end of the name; otherwise the partial directory would be inside.
        self.partial = self.target.with_name(f"{self.target.name}.partial")
        self._problem: str | None = None
        self.attempt(self._make)

    def _make(self) -> None:
        self._fence()
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def _name(self) -> None:
        self._fence()
        removed = self.target.with_name(f"{self.target.name}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        if self.target.exists():
            self.target.rename(removed)  # removed under its own name, a kill could leave half an export there
        self.partial.rename(self.target)
        shutil.rmtree(removed, ignore_errors=True)

    def attempt(self, write: Callable[[], T]) -> T | None:
        """Call the function on rank 0 and return its result. Not collective.

        Returns None on other ranks. Does not call the function if the disk has failed before.
        If the disk fails, the error is raised later in `agree`, because the other ranks wait in collectives.
        """
        if dist.get_rank() == 0 and self._problem is None:
            try:
                return write()
            except (OSError, SafetensorError) as error:
                self._problem = str(error)
        return None

    def agree(self) -> None:
        """Raise ConfigError on every rank if rank 0 could not write, and remove the written files."""
        if problem := broadcast_object(self._problem):
            if dist.get_rank() == 0:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise ConfigError(
                f"the export {self.target} could not be written: {problem}. The checkpoints are intact; free "
                "space and start the same command again."
            )

    def finish(self) -> None:
        """Rename the directory to its final name."""
        self.attempt(self._name)
        self.agree()


def differing(names: list[str]) -> str:
    """Return a message about tensors of the files that differ from the model's; "" if there are none."""
    text = f"{', '.join(names[:4])} in the files differ from the model's, {len(names)} in all"
    return text if names else ""


def raise_problem(directory: Path, problem: str | None) -> None:
    """Raise WronglyExported on every rank if rank 0 has found a problem. Collective over the world."""
    if problem := broadcast_object(problem):
        raise WronglyExported(f"{directory}: {problem}; the model itself is unchanged.")


OF_SOURCE = (
    *(".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"),
    *(".onnx", ".npz", "README.md", "trainer_state.json"),
)
"""Suffixes of files that are not copied: weights, and files that describe the source's weights."""
TEMPLATES = "additional_chat_templates"
"""Directory of a tokenizer's named chat templates."""
MAX_FILE_BYTES = 4 << 30
"""Maximum size of one safetensors file, in bytes; rank 0 needs about this much memory."""


def export_hf(
    trainer: TrainingEngine,
    source: str,
    target: str,
    *,
    fence: Callable[[], None] = lambda: None,
    check: Callable[[Path], str | None] = lambda directory: None,
) -> None:
    """Write the trainer's weights to `target`, with config and all other files of the checkpoint `source`.

    Collective over the world; rank 0 writes. The directory gets its name when it is complete and every tensor
    in its files equals the model's. Raises WronglyExported on every rank if a tensor differs, and ConfigError
    if the disk is full or fails.

    fence: called on rank 0 before files are written or replaced; an exception from it ends the export.
    check: called on every rank with the complete directory before it gets its name. On rank 0 it returns a
        message if something is wrong with the directory, else None.
    """
    writes = dist.get_rank() == 0
    files: list[str] = []
    index: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0
    directory = NewDirectory(target, fence)
    partial = directory.partial

    def flush() -> None:
        fence()
        name = f"model-{len(files) + 1:05d}.safetensors"
        save_tensors(pending, partial / name)
        files.append(name)
        index.update(dict.fromkeys(pending, name))

    def write_rest() -> str:
        flush()
        problem = _problem(partial, index, weights, expected)
        _name_files(partial, files, index, total_bytes)
        _copy_config(exported, Path(source), partial)
        return problem

    exported = trainer.parts.exported_map(trainer.weight_map)
    weights = exported.weights
    size = sum(weight.num_elements * weight.bytes_per_element(exported.dtype.itemsize) for weight in weights)
    directory.attempt(lambda: _refuse_full(partial, size))
    directory.agree()
    tensors = ((name, tensor.cpu()) for name, tensor in trainer.full_weights() if writes)
    for name, tensor in as_stored(weights, tensors):
        if pending and pending_bytes + tensor.nbytes > MAX_FILE_BYTES:
            directory.attempt(flush)
            pending, pending_bytes = {}, 0
        pending[name] = tensor.contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    expected = exported_checksums(trainer, exported, trainer.parts.merging())
    problem = directory.attempt(write_rest)
    directory.agree()
    raise_problem(partial, problem)
    raise_problem(partial, check(partial))
    directory.finish()


def _refuse_full(directory: Path, num_bytes: int) -> None:
    if (free := shutil.disk_usage(directory).free) < num_bytes:
        raise OSError(f"it needs {num_bytes} bytes, but {free} are free")


def _problem(directory: Path, index: dict[str, str], weights: list[Weight], expected: dict[str, int]) -> str:
    """Compare the tensors of the files with the model's; return a message as `differing` does.

    index: name of each tensor in the files -> its file. expected: checksums of the model's tensors.
    """
    files = {name: directory / file for name, file in index.items()}
    reader, wrong = TensorReader(files, weights), []
    for weight in weights:
        for name, shape in zip(weight.hf, weight.shapes):
            is_there = files.keys() >= stored_shapes(weight).keys()
            found = placed_checksum(reader.read(name, whole(shape)).contiguous()) if is_there else None
            if found is None or int(found) % 2**64 != expected[name]:
                wrong.append(name)
    return differing(wrong)


def _name_files(directory: Path, files: list[str], index: dict[str, str], total_bytes: int) -> None:
    """Rename the files to Hugging Face's names.

    One file becomes model.safetensors. N files become model-00001-of-0000N.safetensors, ... with an index.
    """
    if len(files) == 1:
        (directory / files[0]).rename(directory / "model.safetensors")
        return
    renamed = {name: name.replace(".safetensors", f"-of-{len(files):05d}.safetensors") for name in files}
    for old, new in renamed.items():
        (directory / old).rename(directory / new)
    weight_map = {tensor: renamed[file] for tensor, file in index.items()}
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))


def _copy_config(model: WeightMap, source: Path, target: Path) -> None:
    """Write the config of the weights, and copy all other files, because any of them may affect loading."""
    config = copy.deepcopy(as_written(model.hf))
    dtype = str(model.dtype).removeprefix("torch.")
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        if part is config or {"dtype", "torch_dtype"} & part.keys():
            part["dtype"] = dtype
        part.pop("torch_dtype", None)
    config.pop("quantization_config", None)  # weights are written in the dtype of training
    has_head = any(weight.megatron.startswith("mtp.") for weight in model.weights)
    config |= {key: 0 for key in PREDICTING if config.get(key) and not has_head}  # layers that are left out
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for path in source.iterdir():
        is_own = path.name == "config.json" or path.name.endswith(OF_SOURCE)
        if path.is_file() and not path.name.startswith(".") and not is_own:
            shutil.copy(path, target / path.name)
    if (templates := source / TEMPLATES).is_dir():
        shutil.copytree(templates, target / TEMPLATES)
