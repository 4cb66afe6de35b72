"""Every name of vLLM, Megatron, Transformer Engine and torch.cuda that the program uses exists in the pinned
versions and accepts the arguments of its calls."""

import re
from pathlib import Path

from tests.spawn import ROOT
from tools.library_names import (
    ATTRIBUTES,
    CHECKED,
    RecordedLibrary,
    installed,
    megatron_on_te,
    problems,
    program_files,
    uses,
)

RECORD = Path(__file__).parent / "transformer_engine.json"
WITHOUT = {
    # Used only for other versions of TE, or in a `try` with an alternative.
    "Linear",
    "LayerNormLinear",
    "ops.LayerNorm",
    "ops.RMSNorm",
    "attention.apply_rotary_pos_emb",
    "attention._SplitAlongDim",
    "DelayedScaling",
    "FP8GlobalStateManager.add_fp8_tensors_to_global_buffer",
    # TE 2.11 has no get_workspace, so Megatron's te_general_gemm is None and routers run in torch.
    "module.base.get_workspace",
}
"""Suffixes of names that Megatron 0.16.1 uses and Transformer Engine 2.11.0 lacks."""


def libraries():
    packages = {name.partition(".")[0] for name in CHECKED}
    found = {package: installed(package) for package in packages}
    return {package: library for package, library in found.items() if library is not None}


def test_the_installed_libraries_have_every_name():
    found = uses(program_files())
    assert {"vllm", "megatron", "torch"} <= libraries().keys()
    assert {
        "vllm.LLM",
        "torch.cuda.synchronize",
        "megatron.core.parallel_state.initialize_model_parallel",
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.reload_weights",
    } <= {use.name for use in found}
    assert problems(found, libraries()) == []


def test_every_attribute_of_the_engines_parts_is_checked():
    listed = {name.partition("(")[0] for names in ATTRIBUTES.values() for name in names.split()}
    on_cpu = {"log_softmax", "masks", "logprobs", "drafter"}
    found = set()
    for file in (ROOT / "rl" / "rollout").glob("*.py"):
        for path in re.findall(r"\bengine\.(?:llm|runner|scheduler)((?:\.\w+)+)", file.read_text()):
            found.add(path.split(".")[1])
    assert {"llm_engine", "requests", "lora_manager"} <= found <= listed | on_cpu


def test_recorded_transformer_engine_has_every_name():
    te = RecordedLibrary(RECORD)
    pinned = re.search(r"transformer-engine\[[^]]*\]==([\d.]+)", (ROOT / "setup.py").read_text())
    assert pinned is not None and te.recorded_version == pinned[1]
    assert problems(uses(program_files(), ("transformer_engine",)), {te.package: te}) == []


def test_megatron_lacks_only_known_names_of_transformer_engine():
    te = RecordedLibrary(RECORD)
    found = uses(megatron_on_te(), ("transformer_engine",))
    missing = [text.partition(": ")[2] for text in problems(found, {te.package: te})]
    unknown = [text for text in missing if not any(re.search(rf"\.{re.escape(n)}\b", text) for n in WITHOUT)]
    assert len(found) > 100 and missing and unknown == []


def test_renamed_arguments_and_names_are_reported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from vllm import LLM, Absent\n"
        "from megatron.core import parallel_state as state\n"
        "options = dict(moe_backend='triton', renamed_option=1)\n"
        "LLM('model', dtype='bfloat16', **options)\n"
        "state.initialize_model_parallel(tensor_parallel=2)\n"
        "torch.cuda.synchronise()\n"
        "torch.cuda.set_device(0)\n"
    )
    only = [use for use in uses([program]) if "ATTRIBUTES" not in use.where]
    found = [text.partition("program.py:")[2] for text in problems(only, libraries())]
    assert found == [
        "2: vllm has no vllm.Absent",
        "5: vllm.LLM has no parameter renamed_option",
        "6: megatron.core.parallel_state.initialize_model_parallel has no parameter tensor_parallel",
        "7: torch has no torch.cuda.synchronise",
    ]
