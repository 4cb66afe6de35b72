"""Model directories with random damage to their files, JSON values, bytes and tensors, read as a start does.

What is accepted is read by transformers, too: both must understand the same directory, tensor by tensor.
"""

import atexit
import functools
import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from rl.training import cpu_support

cpu_support.install()

from rl.config.checks import check  # noqa: E402
from rl.config.schema import load_config  # noqa: E402
from rl.engines.inputs import Inputs  # noqa: E402
from rl.models import architecture  # noqa: E402
from rl.models.files import TensorReader, tensor_files  # noqa: E402
from rl.training.weights import load_hf  # noqa: E402
from tests.fuzz.cases import Case, Silent, Unnamed  # noqa: E402
from tools.tiny_models import save_tiny  # noqa: E402

FAMILIES = {
    "Qwen2ForCausalLM": False,
    "Qwen3ForCausalLM": True,
    "LlamaForCausalLM": False,
    "Qwen3MoeForCausalLM": False,
    "GptOssForCausalLM": False,
    "DeepseekV3ForCausalLM": False,
    "Gemma3ForCausalLM": True,
    "MixtralForCausalLM": False,
}
"""Architecture -> whether the embedding is tied to the head."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**9, 10**30, 0.5, -0.0, 1e-30, float("nan"), float("inf")),
    *("", "x", "1", "true", "float32", "int8", "\ud800", "\x00", "a" * 5000, [], {}, [1], [[]], [None]),
    *(["a", "b"], {"a": 1}, {"a": {"b": []}}, {"__type__": "AddedToken", "content": 5}, [{"name": "x"}]),
)
UNREAD = {"comment": "by a person", "unsloth_version": "2025.1", "_commit_hash": None, "my_key": {"a": [1]}}
"""Keys that nobody reads."""


@dataclass
class Damage:
    notes: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Files, keys and tensors; a refusal must name one of them."""
    harmless: bool = True
    fatal: bool = False
    """Whether no reader could use the directory."""

    def note(self, text: str, *names: str, harmless: bool = False, fatal: bool = False) -> None:
        self.notes.append(text)
        self.names |= {name for name in names if name}
        self.harmless &= harmless
        self.fatal |= fatal


Change = Callable[[random.Random, Path, Damage], None]


@functools.cache
def model_directory(family: str) -> Path:
    """Return a tiny model; made once per process."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-model-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(directory, ignore_errors=True))
    save_tiny(family, directory, seed=0, tie=FAMILIES[family])
    return directory


logging.disable_progress_bar()
logging.set_verbosity_error()
for _family in FAMILIES:  # before any case is forked
    model_directory(_family)


def case(rng: random.Random, directory: Path) -> Case:
    family = rng.choice(list(FAMILIES))
    model = Path(shutil.copytree(model_directory(family), directory / "model"))
    damage = Damage()
    if rng.random() < 0.35:
        _divide(model)
        damage.note("two shards", harmless=True)
    for _ in range(rng.choice((1, 1, 1, 2))):
        rng.choice(CHANGES)(rng, model, damage)
    rows = directory / "rows.jsonl"
    messages = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": "46"}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    what = f"{family}: " + "; ".join(damage.notes)
    valid = True if damage.harmless else False if damage.fatal else None
    return Case(what, lambda: _start(model, rows, damage), valid=valid)


def _start(model: Path, rows: Path, damage: Damage) -> str:
    try:
        config = load_config(
            None,
            [
                f"model.path={model}",
                f"data.train=[{rows}]",
                "data.messages_key=messages",
                "data.max_prompt_tokens=64",
                "model.dtype=float32",
                "run.name=fuzz",
                "algorithm=sft",
            ],
        )
        check(config)
        hf = Inputs(config, 1).models["policy"].hf
        weights = architecture(hf).weights(hf)
        parameters = [(weight, torch.empty(weight.megatron_shape(1))) for weight in weights]
        pieces = lambda weight: weight.megatron_pieces(1, 0)  # noqa: E731
        load_hf(str(model), SimpleNamespace(weights=weights, local=lambda: parameters, pieces=pieces))
    except ValueError as refusal:
        text = str(refusal)
        if damage.names and not any(name in text for name in damage.names):
            raise Unnamed(f"names none of {sorted(damage.names)[:12]}: {text}") from None
        raise
    return _compare(model, weights)


def _compare(model: Path, weights: list) -> str:
    """Raise Silent if transformers cannot read an accepted directory, or reads other tensors."""
    try:
        AutoConfig.from_pretrained(model)
        if (model / "generation_config.json").exists():
            GenerationConfig.from_pretrained(model)
        theirs, loading = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:
        raise Silent(f"accepted, but transformers: {type(error).__name__}: {str(error)[:600]}") from None
    if odd := {key: str(value)[:200] for key, value in loading.items() if value}:
        raise Silent(f"accepted, but transformers reports {odd}")
    state, files = theirs.state_dict(), tensor_files(str(model), weights)
    reader, number = TensorReader(files, weights), 0
    for weight in weights:
        for name, shape in zip(weight.hf, weight.shapes):
            if name in state and name in files and tuple(state[name].shape) == shape:
                own = reader.read(name, tuple((0, size) for size in shape)).float()
                if not torch.equal(own, state[name].float()):
                    raise Silent(f"{name} differs from what transformers reads")
                number += 1
    return f"{number} tensors as transformers reads them"


def _divide(model: Path) -> None:
    found = load_file(model / WEIGHTS)
    names = sorted(found)
    (model / WEIGHTS).unlink()
    places = {name: SHARDS[2 * number >= len(names)] for number, name in enumerate(names)}
    for file in SHARDS:
        own = {name: found[name] for name in names if places[name] == file}
        save_file(own, model / file, metadata={"format": "pt"})
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    (model / INDEX).write_text(text)


def _files(model: Path, *ends: str) -> list[str]:
    return sorted(path.name for path in model.iterdir() if path.is_file() and path.name.endswith(ends or ""))


def _load(model: Path, file: str) -> Any:
    """Return the content of a JSON file; an empty object if earlier damage made it unreadable."""
    try:
        found = json.loads((model / file).read_text())
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _place(rng: random.Random, tree: Any) -> tuple[Any, Any, list[str]]:
    """Return a container, a key in it, and the names on the way to it."""
    names: list[str] = []
    while True:
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = rng.choice(list(keys))
        names += [key] if isinstance(key, str) else []
        deeper = isinstance(tree[key], dict | list) and len(tree[key]) > 0
        if not deeper or rng.random() < 0.3:
            return tree, key, names
        tree = tree[key]


def _edit_value(rng: random.Random, model: Path, damage: Damage) -> None:
    file = rng.choice(("config.json", "config.json", *_files(model, ".json")))
    if not (tree := _load(model, file)):
        return
    holder, key, names = _place(rng, tree)
    old, form = holder[key], rng.randrange(6)
    if form == 0:
        del holder[key]
        new = "nothing"
    elif form == 1 and isinstance(key, str):
        new = f"the key {key}x"
        holder[key + "x"] = holder.pop(key)
    elif form == 2 and isinstance(old, int | float):
        holder[key] = rng.choice((old + 1, old - 1, old * 2, -old, old / 2, str(old), [old]))
        new = repr(holder[key])
    else:
        holder[key] = rng.choice(VALUES)
        new = repr(holder[key])
    (model / file).write_text(json.dumps(tree))
    where = ".".join(names)
    names += ["tokenizer of"] if file.startswith(("token", "special")) else []
    damage.note(f"{file}: {where}: {old!r:.40} became {new:.60}", file, *names)


def _add_key(rng: random.Random, model: Path, damage: Damage) -> None:
    file = rng.choice([name for name in _files(model, ".json") if name != "tokenizer.json"])
    key = rng.choice(list(UNREAD))
    (model / file).write_text(json.dumps(_load(model, file) | {key: UNREAD[key]}))
    damage.note(f"{file} gets {key}", file, harmless=True)


def _rewrite(rng: random.Random, model: Path, damage: Damage) -> None:
    file = rng.choice(_files(model, ".json"))
    indent, order = rng.choice((None, 1, 8)), rng.random() < 0.5 and file != "tokenizer.json"
    text = json.dumps(_load(model, file), indent=indent, sort_keys=order, ensure_ascii=rng.random() < 0.5)
    (model / file).write_bytes((text + rng.choice(("", "\n", "\r\n \t"))).encode())
    damage.note(f"{file} written again", file, harmless=True)


def _bytes(rng: random.Random, model: Path, damage: Damage) -> None:
    file = rng.choice(_files(model))
    content = bytearray((model / file).read_bytes())
    place = rng.randrange(len(content) or 1)
    if file.endswith(".safetensors") and rng.random() < 0.6:
        place = rng.randrange(min(len(content), 3000))  # the header
    form = rng.choice(("flip", "cut", "insert", "remove", "zero", "empty", "BOM", "append", "double"))
    if form == "flip" and content:
        content[place] ^= 1 << rng.randrange(8)
    elif form == "cut":
        del content[place:]
    elif form == "insert":
        content[place:place] = rng.choice((b"\xff", b"{", b"[", b'"', b",", b"\x00" * 7, b"9" * 300))
    elif form == "remove":
        del content[place : place + rng.randrange(1, 40)]
    elif form == "zero":
        content[place : place + 16] = bytes(len(content[place : place + 16]))
    elif form == "empty":
        content.clear()
    elif form == "BOM":
        content[:0] = b"\xef\xbb\xbf"
    elif form == "append":
        content += rng.choice((b"\n", b"x", b"\x00" * 64, b"{}"))
    else:
        content += bytes(content)
    (model / file).write_bytes(bytes(content))
    safetensors = file.endswith(".safetensors")
    names = [*_names(model)] if safetensors else []
    fatal = form == "empty" and (safetensors or file in ("config.json", "tokenizer.json"))
    names += ["chat template"] if file == "chat_template.jinja" else []
    damage.note(f"{file}: {form} at byte {place}", file, *names, fatal=fatal)


def _names(model: Path) -> list[str]:
    """Return the names of the tensors in the undamaged model of this directory."""
    return ["tokenizer"] if not (model / "config.json").is_file() else ["model.layers", "embed", "lm_head"]


def _odd_file(rng: random.Random, model: Path, damage: Damage) -> None:
    file = rng.choice((*_files(model), *_files(model, ".json", ".safetensors")))
    path, kept = model / file, model / f"kept-{file}"
    form = rng.choice(("removed", "directory", "dangling", "loop", "FIFO", "device", "named otherwise"))
    if form == "named otherwise":
        path.rename(path.with_suffix(path.suffix + rng.choice((".bak", ".incomplete", ".lock"))))
    else:
        path.unlink()
    if form == "directory":
        path.mkdir()
    elif form == "dangling":
        path.symlink_to("/nowhere/file")
    elif form == "loop":
        path.symlink_to(kept.name)
        kept.symlink_to(path.name)
    elif form == "FIFO":
        os.mkfifo(path)
    elif form == "device":
        path.symlink_to(rng.choice(("/dev/null", "/dev/full")))
    fatal = file.endswith(".safetensors") or file in ("config.json", "tokenizer.json")
    damage.note(f"{file}: {form}", file, "tokenizer" if "token" in file else "", "safetensors", fatal=fatal)


def _usual_place(rng: random.Random, model: Path, damage: Damage) -> None:
    """Store the files as hubs and clusters do: links to blobs, read-only files, further files beside them."""
    form = rng.choice(("links", "read-only", "further files", "hard links"))
    if form == "further files":
        for name, content in {
            "README.md": b"# A model",
            ".gitattributes": b"*.safetensors lfs",
            "model.safetensors.lock": b"",
            "training_args.bin": b"\x80",
            "optimizer.pt": b"\x80",
            "trainer_state.json": b"{}",
            "params.json": b"{}",
            "special_tokens_map.json": b"{}",
        }.items():
            (model / name).write_bytes(content)
        (model / "original").mkdir(exist_ok=True)
        (model / "original" / "consolidated.safetensors").write_bytes(b"no")
        (model / ".cache").mkdir(exist_ok=True)
    for number, path in enumerate(sorted(path for path in model.iterdir() if path.is_file())):
        if form == "read-only":
            path.chmod(0o444)
        elif form in ("links", "hard links"):
            blobs = model.parent / "blobs"
            blobs.mkdir(exist_ok=True)
            path.rename(blob := blobs / f"{len(damage.notes)}-{number}")
            path.hardlink_to(blob) if form == "hard links" else path.symlink_to(blob)
    damage.note(form, harmless=True)


def _change_tensor(rng: random.Random, model: Path, damage: Damage) -> None:
    if not (files := _files(model, ".safetensors")):
        return
    path = model / rng.choice(files)
    try:
        found = load_file(path)
    except Exception:  # earlier damage
        return
    name = rng.choice(sorted(found))
    tensor, form = found[name], rng.choice(list(TENSORS))
    fatal = form not in ("float16", "bfloat16", "float64", "swap", "scale", "transpose")
    if form == "swap":
        same = [other for other in sorted(found) if found[other].shape == tensor.shape]
        other = rng.choice(same)
        found[name], found[other] = found[other].clone(), tensor.clone()
    elif form == "drop":
        del found[name]
    elif form == "name":
        found[rng.choice((f"base_model.model.{name}", f"{name}.bias", "_orig_mod." + name))] = found.pop(name)
    elif form == "further":
        found[rng.choice(("model.layers.0.x.weight", "score.weight", "v_head.weight", name + ".lora_A"))] = (
            tensor
        )
    elif TENSORS[form] is not None:
        found[name] = TENSORS[form](tensor.clone())
    save_file({key: value.contiguous().clone() for key, value in found.items()}, path, {"format": "pt"})
    if form in ("drop", "name", "further"):
        fatal = not name.endswith("inv_freq")
    damage.note(
        f"{path.name}: {name} {form}",
        *(path.name, name, name.split(".experts.")[0], "score.weight", "v_head.weight", "layers.0.x", INDEX),
        harmless=form in ("float64", "bfloat16", "float16"),
        fatal=fatal,
    )


def _one(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def set_one(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[tensor.numel() // 3] = value
        return tensor

    return set_one


DTYPES = ("float16", "bfloat16", "float64", "int8", "int32", "bool", "float8_e4m3fn", "complex64")
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    **{name: partial(torch.Tensor.to, dtype=getattr(torch, name)) for name in DTYPES},
    "NaN": _one(float("nan")),
    "infinite": _one(float("-inf")),
    "scale": lambda tensor: tensor * 1000,
    "shorter": lambda tensor: tensor[:-1],
    "longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "flat": lambda tensor: tensor.reshape(1, -1),
    "empty": lambda tensor: tensor[:0],
    "transpose": lambda tensor: tensor.mT if tensor.dim() > 1 else tensor,
    "swap": None,
    "drop": None,
    "name": None,
    "further": None,
}


def _index(rng: random.Random, model: Path, damage: Damage) -> None:
    if not (places := _load(model, INDEX).get("weight_map")) or not isinstance(places, dict):
        return _stale(rng, model, damage)
    name = rng.choice(sorted(places))
    form = rng.choice(("other file", "no entry", "value", "further", "case", "path", "total"))
    harmless, whole = form == "total", {"metadata": {"total_size": 1}, "weight_map": places}
    if form == "other file":
        places[name] = SHARDS[places[name] == SHARDS[0]]
    elif form == "no entry":
        del places[name]
    elif form == "value":
        places[name] = rng.choice(VALUES)
    elif form == "further":
        places[name + "x"] = rng.choice((*SHARDS, "other.safetensors"))
    elif form == "case":
        places[name] = str(places[name]).upper()
    elif form == "path":
        places[name] = rng.choice(("./", "../", "/tmp/", "a/")) + str(places[name])
    else:
        whole["metadata"] = rng.choice(({}, {"total_size": 0}, {"total_size": "1"}))
    (model / INDEX).write_text(json.dumps(whole))
    damage.note(f"{INDEX}: {form} of {name}", INDEX, name, str(places.get(name)), harmless=harmless)


def _stale(rng: random.Random, model: Path, damage: Damage) -> None:
    """Add weights of another time or format beside the model's own."""
    name = rng.choice(
        ("consolidated.safetensors", "pytorch_model.bin", "model-00003-of-00003.safetensors", INDEX, WEIGHTS)
    )
    if (model / name).exists() or not (files := _files(model, ".safetensors")):
        return
    content = json.dumps({"weight_map": {"a": files[0]}}).encode() if name == INDEX else b""
    (model / name).write_bytes(content or (model / files[0]).read_bytes())
    damage.note(f"{name} beside {files[0]}", name)


def _header(rng: random.Random, model: Path, damage: Damage) -> None:
    """Change the header of a safetensors file, and its length with it."""
    if not (files := _files(model, ".safetensors")):
        return
    file = rng.choice(files)
    content = (model / file).read_bytes()
    if len(content) < 8 or (size := struct.unpack("<Q", content[:8])[0]) > len(content) - 8:
        return
    try:
        header = json.loads(content[8 : 8 + size])
    except ValueError:
        return
    name = rng.choice([key for key in header if key != "__metadata__"] or ["none"])
    form = rng.choice(("offsets", "dtype", "shape", "metadata", "no metadata", "length", "deep", "name"))
    if form == "offsets":
        header[name]["data_offsets"] = rng.choice(([0, 0], [0, 2**62], [5, 1], [-1, 3], "x", [0]))
    elif form == "dtype":
        header[name]["dtype"] = rng.choice(("F32 ", "f32", "F4", "X", 3, None, "I32", "BF16"))
    elif form == "shape":
        header[name]["shape"] = rng.choice(([], [2**40, 2**40], [-1], "x", [*header[name]["shape"], 1]))
    elif form == "metadata":
        header["__metadata__"] = rng.choice(
            ({"format": 5}, {"format": "tf"}, {"format": "pt", "x": "y"}, [], "x")
        )
    elif form == "no metadata":
        header.pop("__metadata__", None)
    elif form == "name":
        header[rng.choice(("", "\x00", "\u00e9", "a" * 10_000))] = header.pop(name)
    text = json.dumps(header).encode()
    if form == "deep":
        text = b"[" * 100_000
    length = rng.choice((0, 2**63, len(text) + 10**6)) if form == "length" else len(text)
    (model / file).write_bytes(struct.pack("<Q", length) + text + content[8 + size :])
    fatal = form in ("offsets", "shape", "length", "deep", "name")
    damage.note(f"{file}: header, {form} of {name}", file, name, fatal=fatal)


def _template(rng: random.Random, model: Path, damage: Damage) -> None:
    texts = ("", "{{", "{% for x in %}", "{{ x.y.z }}", "{{ messages }}", "\ud800", "a", "{% include 'x' %}")
    file = rng.choice(("chat_template.jinja", "chat_template.json", "additional"))
    text = rng.choice(texts)
    if file == "additional":
        (model / "additional_chat_templates").mkdir(exist_ok=True)
        file = "additional_chat_templates/rag.jinja"
    content = json.dumps({"chat_template": text}) if file.endswith("json") else text
    (model / file).write_bytes(content.encode(errors="surrogatepass"))
    damage.note(f"{file} is {text!r}", file, "chat template", "chat_template", "template")


CHANGES: tuple[Change, ...] = (
    *(_edit_value, _edit_value, _edit_value, _edit_value, _bytes, _bytes, _odd_file, _usual_place),
    *(_change_tensor, _change_tensor, _index, _header, _template, _add_key, _rewrite, _stale),
)
