"""The safetensors files of a Hugging Face checkpoint: which tensor is where, and whether all are there."""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from rl.models.layout import Weight


def tensor_files(directory: str, weights: list[Weight]) -> dict[str, Path]:
    """Tensor name -> the file that holds it. Reads headers only.

    Raises ValueError if there are no files, or that lists tensors which are missing or have another shape than config.json
    says; optional weights may be missing. Tensors that no weight names are left alone (a tied head that was saved again).
    """
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        raise ValueError(f"model.path={directory} holds no *.safetensors file; Lockstep reads no other format.")
    files, shapes = {}, {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():
                    files[name], shapes[name] = path, tuple(opened.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}.") from error
    wanted = {name: shape for weight in weights for name, shape in zip(weight.hf, weight.shapes)}
    may_lack = {name for weight in weights if weight.optional for name in weight.hf} - files.keys()
    wanted = {name: shape for name, shape in wanted.items() if name not in may_lack}
    if missing := [name for name in wanted if name not in files]:
        raise ValueError(f"{directory} lacks {len(missing)} tensors of its architecture: {_few(missing)}.")
    if odd := [f"{name} has {shapes[name]}, not {shape}" for name, shape in wanted.items() if shapes[name] != shape]:
        raise ValueError(f"{directory} has {len(odd)} tensors of another shape than config.json says: {_few(odd)}.")
    return files


def _few(items: list[str]) -> str:
    return ", ".join(items[:8]) + (", ..." if len(items) > 8 else "")
