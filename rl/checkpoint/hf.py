"""Write the policy as a Hugging Face checkpoint directory that transformers and vLLM load."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from rl.checkpoint.contents import exported_checksums
from rl.models import as_written
from rl.models.boxes import whole
from rl.models.files import TensorReader, as_stored, save_tensors, stored_shapes
from rl.models.layout import Weight
from rl.models.sizes import PREDICTING
from rl.runtime.checksum import placed_checksum
from rl.runtime.collectives import broadcast_object
from rl.training.engine import TrainingEngine
from rl.training.weights import WeightMap


class WronglyExported(RuntimeError):
    """Raised on every rank if a written tensor is not the model's."""


@contextmanager
def new_directory(target: str, fence: Callable[[], None]) -> Iterator[Path]:
    """Yield a directory that rank 0 has created, and give it the name `target` at the end of the context.

    After an exception it keeps the name target.partial. Collective over the world. fence: see `export_hf`.
    """
    final, partial = Path(target), Path(target + ".partial")
    if dist.get_rank() == 0:
        fence()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    yield partial
    if dist.get_rank() == 0:
        fence()
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier()


def differing(names: list[str]) -> str:
    """Return a message about tensors of the files that differ from the model's; "" if there are none."""
    return (
        f"{', '.join(names[:4])} in the files differ from the model's, {len(names)} in all" if names else ""
    )


def raise_problem(directory: Path, problem: str | None) -> None:
    """Raise WronglyExported on every rank if rank 0 has found a problem. Collective over the world."""
    if problem := broadcast_object(problem):
        raise WronglyExported(f"{directory}: {problem}; the model itself is unchanged.")


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
    """Write the trainer's weights to `target`, with config and tokenizer files of the checkpoint `source`.

    Collective over the world; rank 0 writes. The directory gets its name when it is complete and every tensor
    in its files is that of the model. Raises WronglyExported on every rank if one is not.

    fence: called on rank 0 before files are written or replaced; an exception from it ends the export.
    check: called on every rank with the complete directory before it gets its name; returns on rank 0 what is
        wrong with it, if anything is.
    """
    writes = dist.get_rank() == 0
    files: list[str] = []
    index: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush(partial: Path) -> None:
        fence()
        name = f"model-{len(files) + 1:05d}.safetensors"
        save_tensors(pending, partial / name)
        files.append(name)
        index.update(dict.fromkeys(pending, name))

    with new_directory(target, fence) as partial:
        exported = trainer.parts.exported_map(trainer.weight_map)
        weights = exported.weights
        tensors = ((name, tensor.cpu()) for name, tensor in trainer.full_weights() if writes)
        for name, tensor in as_stored(weights, tensors):
            if pending and pending_bytes + tensor.nbytes > MAX_FILE_BYTES:
                flush(partial)
                pending, pending_bytes = {}, 0
            pending[name] = tensor.contiguous()
            pending_bytes += tensor.nbytes
            total_bytes += tensor.nbytes
        expected, problem = exported_checksums(trainer, exported, trainer.parts.merging()), None
        if writes:
            flush(partial)
            problem = _problem(partial, index, weights, expected)
            _name_files(partial, files, index, total_bytes)
            _copy_config(exported, Path(source), partial)
        raise_problem(partial, problem)
        raise_problem(partial, check(partial))


def _problem(directory: Path, index: dict[str, str], weights: list[Weight], expected: dict[str, int]) -> str:
    """Return `differing` for the tensors of the files.

    index: name of each tensor in the files -> its file. expected: checksums of the model's tensors.
    """
    files = {name: directory / file for name, file in index.items()}
    reader, wrong = TensorReader(files, weights), []
    for weight in weights:
        for name, shape in zip(weight.hf, weight.shapes):
            if not files.keys() >= stored_shapes(weight).keys():
                wrong.append(name)
            elif int(placed_checksum(reader.read(name, whole(shape)).contiguous())) % 2**64 != expected[name]:
                wrong.append(name)
    return differing(wrong)


def _name_files(directory: Path, files: list[str], index: dict[str, str], total_bytes: int) -> None:
    """Rename the files to Hugging Face's names.

    They are model.safetensors for one file, else model-00001-of-0000N.safetensors, ... with an index.
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
    config = dict(as_written(model.hf))
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)  # weights are written in the dtype of training
    has_head = any(weight.megatron.startswith("mtp.") for weight in model.weights)
    config |= {key: 0 for key in PREDICTING if config.get(key) and not has_head}  # layers that are left out
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for pattern in (
        "*token*",
        "generation_config.json",
        "vocab*",
        "merges.txt",
        "*.jinja",
        "*processor_config.json",
    ):
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copy(path, target / path.name)
