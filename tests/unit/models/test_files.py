"""Reading the tensors of a checkpoint, and errors about missing, wrong or additional ones."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.models import architecture, read_hf_config
from rl.models import files as files_module
from rl.models.files import TensorReader, as_stored, refuse_extra, save_tensors, tensor_files
from rl.models.layout import COLUMN, Stored, Weight
from tests.checkpoints import quantise_experts, save_tiny
from tests.ordinary_user import as_ordinary_user


def weights(*names: str) -> list[Weight]:
    return [Weight((name,), ((4, 2),), name, name, COLUMN) for name in names]


def test_tensors_are_found_in_several_files(tmp_path):
    save_file({"a": torch.zeros(4, 2), "unused": torch.zeros(1)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(4, 2)}, tmp_path / "2.safetensors")
    files = tensor_files(str(tmp_path), weights("a", "b"))
    assert (files["a"].name, files["b"].name) == ("1.safetensors", "2.safetensors")


@pytest.mark.parametrize(
    "shapes, expected, message",
    [
        ({"a": (4, 2)}, "abc", r"lacks 2 tensors of its architecture: b, c; copy"),
        ({"a": (4, 3)}, "a", r"a has \(4, 3\), not \(4, 2\)"),
        ({"a": (4, 2), "a_scale_inv": (2, 1)}, "a", r"a_scale_inv has \(2, 1\), not \(1, 1\)"),
    ],
)
def test_missing_and_wrong_tensors_are_listed(shapes, expected, message, tmp_path):
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "1.safetensors")
    with pytest.raises(ValueError, match=message):
        tensor_files(str(tmp_path), weights(*expected))


def test_no_safetensors_and_truncated_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no .*safetensors"):
        tensor_files(str(tmp_path), weights("a"))
    (tmp_path / "1.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match="1.safetensors is damaged or no safetensors file"):
        tensor_files(str(tmp_path), weights("a"))


def test_a_file_without_permission_is_not_called_missing(tmp_path):
    """As safetensors calls it. What this project writes has the user's umask, so that a group can use it."""
    before = os.umask(0o027)
    save_tensors({"a": torch.zeros(4, 2)}, tmp_path / "1.safetensors")
    os.umask(before)
    assert (tmp_path / "1.safetensors").stat().st_mode & 0o777 == 0o640
    program = "from rl.models.files import tensor_files; import sys; tensor_files(sys.argv[1], [])"
    done = as_ordinary_user(tmp_path, [sys.executable, "-c", program, str(tmp_path)])
    assert "1.safetensors cannot be read: it has owner=0 and mode=0640; its owner can chmod it" in done.stderr


def test_tensors_unknown_to_the_architecture_are_listed():
    hf = dict(architectures=["QwenForCausalLM"], num_hidden_layers=2, num_nextn_predict_layers=1)
    harmless = ["a", "a_scale_inv", "lm_head.weight", "model.layers.2.enorm.weight"]
    refuse_extra("model", dict.fromkeys(harmless, Path("file")), weights("a"), hf)
    with pytest.raises(
        ValueError, match="has 2 tensors that QwenForCausalLM does not have: b_scale_inv, model.layers.3.w"
    ):
        names = [*harmless, "b_scale_inv", "model.layers.3.w"]
        refuse_extra("model", dict.fromkeys(names, Path("file")), weights("a"), hf)


def test_boxes_are_read_from_the_file_that_holds_them(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "MAPPED_BYTES", 16)  # the file is opened again after each
    tensors = {name: torch.arange(8.0).reshape(4, 2) + 10 * i for i, name in enumerate("abc")}
    save_file({"a": tensors["a"], "b": tensors["b"]}, tmp_path / "1.safetensors")
    save_file({"c": tensors["c"]}, tmp_path / "2.safetensors")
    reader = TensorReader(tensor_files(str(tmp_path), weights("a", "b", "c")))
    for name in "abcacb":
        assert torch.equal(reader.read(name, ((1, 3), (0, 2))), tensors[name][1:3])
        assert torch.equal(reader.read(name, ((0, 4), (1, 2))), tensors[name][:, 1:])


def test_an_index_names_the_files_that_are_read(tmp_path):
    for name in ("model-1.safetensors", "consolidated.safetensors"):
        save_file({"a": torch.zeros(4, 2)}, tmp_path / name)
    with pytest.raises(ValueError, match="both hold a; remove"):
        tensor_files(str(tmp_path), weights("a"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert tensor_files(str(tmp_path), weights("a"))["a"].name == "model-1.safetensors"
    index.write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    with pytest.raises(
        ValueError, match="lacks model-2.safetensors, which model.safetensors.index.json names"
    ):
        tensor_files(str(tmp_path), weights("a"))


def test_experts_are_read_from_one_tensor_or_from_mxfp4(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    directory = save_tiny("GptOssForCausalLM", tmp_path, seed=1)
    hf = read_hf_config(directory)
    of_model = architecture(hf).weights(hf)
    whole = load_file(tmp_path / "model.safetensors")
    reader = TensorReader(tensor_files(directory, of_model), of_model)
    name, up = "model.layers.1.mlp.experts.3.gate_up_proj", "model.layers.1.mlp.experts.gate_up_proj"
    box = ((7, 70), (33, 100))
    assert torch.equal(reader.read(name, box), whole[up][3].t()[7:70, 33:100])
    bias = reader.read(name + "_bias", ((8, 16),))
    assert torch.equal(bias, whole[up + "_bias"][3, 8:16])

    quantise_experts(tmp_path)
    codes = load_file(tmp_path / "model.safetensors")
    expected = convert_moe_packed_tensors(codes[up + "_blocks"], codes[up + "_scales"], dtype=torch.float32)
    files = tensor_files(directory, of_model)
    refuse_extra(directory, files, of_model, hf)
    assert torch.equal(TensorReader(files, of_model).read(name, box), expected[3].t()[7:70, 33:100])
    del codes["model.layers.2.mlp.experts.down_proj_scales"]
    save_file(codes, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lacks 1 tensors.*layers.2.mlp.experts.down_proj_scales"):
        tensor_files(directory, of_model)


def test_experts_are_stacked_in_the_order_of_their_weights():
    def stored(expert):
        return replace(weights(f"e{expert}")[0], stored=Stored("all", expert, 2, transposed=True))

    a, b, c = (torch.arange(8.0).view(4, 2) + number for number in range(3))
    both = [*weights("w"), stored(0), stored(1)]
    found = dict(as_stored(both, [("w", c), ("e0", a), ("e1", b)]))
    assert found.keys() == {"w", "all"} and torch.equal(found["all"], torch.stack([a.t(), b.t()]))


def test_experts_are_read_with_rows_and_columns_exchanged(tmp_path):
    """transformers 5 loads some models so and saves them as they are then."""
    directory = save_tiny("Qwen3VLMoeForConditionalGeneration", tmp_path / "published", seed=0)
    of_model = architecture(hf := read_hf_config(directory)).weights(hf)
    tensors = load_file(tmp_path / "published" / "model.safetensors")
    experts = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    exchanged = tmp_path / "exchanged"
    exchanged.mkdir()
    save_file(tensors | experts, exchanged / "model.safetensors")
    weight = next(w for w in of_model if w.expert == 3 and w.layer == 2)
    box = ((7, 60), (5, 100))
    for path in (directory, str(exchanged)):
        found = TensorReader(tensor_files(path, of_model), of_model).read(weight.hf[0], box)
        assert torch.equal(found, tensors[weight.stored.name][3].t()[7:60, 5:100])
