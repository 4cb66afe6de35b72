"""Reading which tensors a checkpoint holds, and saying what is wrong with it."""

import pytest
import torch
from safetensors.torch import save_file

from rl.models.files import tensor_files
from rl.models.layout import COLUMN, Weight


def weights(*names: str) -> list[Weight]:
    return [Weight((name,), ((4, 2),), name, name, COLUMN) for name in names]


def test_tensors_are_found_in_any_number_of_files(tmp_path):
    save_file({"a": torch.zeros(4, 2), "unused": torch.zeros(1)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(4, 2)}, tmp_path / "2.safetensors")
    files = tensor_files(str(tmp_path), weights("a", "b"))
    assert (files["a"].name, files["b"].name) == ("1.safetensors", "2.safetensors")


def test_missing_tensors_are_listed(tmp_path):
    save_file({"a": torch.zeros(4, 2)}, tmp_path / "1.safetensors")
    with pytest.raises(ValueError, match=r"lacks 2 tensors of its architecture: b, c\."):
        tensor_files(str(tmp_path), weights("a", "b", "c"))


def test_tensors_of_another_shape_are_listed_with_both_shapes(tmp_path):
    save_file({"a": torch.zeros(4, 3)}, tmp_path / "1.safetensors")
    with pytest.raises(ValueError, match=r"a has \(4, 3\), not \(4, 2\)"):
        tensor_files(str(tmp_path), weights("a"))


def test_a_directory_without_safetensors_and_a_torn_file_are_named(tmp_path):
    with pytest.raises(ValueError, match="holds no .*safetensors"):
        tensor_files(str(tmp_path), weights("a"))
    (tmp_path / "1.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match="1.safetensors is no whole safetensors file"):
        tensor_files(str(tmp_path), weights("a"))
