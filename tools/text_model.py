"""Write the text model of a Qwen3.5 checkpoint, which has a vision tower, as a checkpoint of its own.

    lockstep model text models/Qwen3.5-35B-A3B --out models/Qwen3.5-35B-A3B-text

The tensors keep their values. The tower and the layers for multi-token prediction are left out. Each expert
becomes a tensor of its own; the published files hold a layer's experts as one. transformers and vLLM read the
result with the classes Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM. Needs the memory of a file of 4 GiB.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser

PREFIX = "model.language_model."
CLASSES = {f"Qwen3_5{kind}ForConditionalGeneration": f"Qwen3_5{kind}ForCausalLM" for kind in ("", "Moe")}
MAX_FILE_BYTES = 4 << 30
COPIED = ("*token*", "vocab*", "merges.txt", "*.jinja", "generation_config.json")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="directory of the published checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; it must not exist")
    options = parser.parse_args(arguments)
    try:
        config = text_config(json.loads((options.checkpoint / "config.json").read_text()))
        options.out.mkdir(parents=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write(text_tensors(options.checkpoint), options.out)
    (options.out / "config.json").write_text(json.dumps(config, indent=2))
    for pattern in COPIED:
        for path in options.checkpoint.glob(pattern):
            shutil.copy(path, options.out / path.name)
    return 0


def text_config(whole: dict) -> dict:
    """Return the config.json of the text model. Raises ValueError for another architecture."""
    name = (whole.get("architectures") or ["(none)"])[0]
    if name not in CLASSES:
        raise ValueError(f"the checkpoint has the architecture {name}, not {' or '.join(CLASSES)}.")
    tied = whole.get("tie_word_embeddings", False)
    dtype = {key: whole[key] for key in ("dtype", "torch_dtype") if key in whole}
    own = {"tie_word_embeddings": tied} | dtype | whole["text_config"]
    return own | {"architectures": [CLASSES[name]], "mtp_num_hidden_layers": 0}


def text_tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of every weight of the text model."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():
                if not name.startswith((PREFIX, "lm_head.")):
                    continue
                name_in_text = name.replace(PREFIX, "model.")
                block, _, kind = name_in_text.rpartition(".experts.")
                if kind not in ("gate_up_proj", "down_proj"):
                    yield name_in_text, opened.get_tensor(name)
                    continue
                stacked = opened.get_slice(name)
                for expert in range(stacked.get_shape()[0]):
                    matrix, own = stacked[expert : expert + 1][0], f"{block}.experts.{expert}"
                    if kind == "down_proj":
                        yield f"{own}.down_proj.weight", matrix
                        continue
                    for part, rows in zip(("gate_proj", "up_proj"), matrix.chunk(2)):
                        yield f"{own}.{part}.weight", rows.contiguous()


def write(tensors: Iterator[tuple[str, torch.Tensor]], out: Path) -> None:
    """Write tensors as safetensors files with an index."""
    pending: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}

    def flush() -> None:
        file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(pending, out / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(pending, file))
        pending.clear()

    size = total = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > MAX_FILE_BYTES:
            flush()
            size = 0
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (out / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    raise SystemExit(main())
