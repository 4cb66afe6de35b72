"""The file of one rank: its format, reading any box from it, detecting damage."""

import pytest
import torch
from safetensors.torch import load_file

from rl.checkpoint.shards import (
    DamagedError,
    Shard,
    ShardReader,
    Written,
    check_file,
    in_file_order,
    num_bytes,
    read_index,
    reading,
    write_shards,
)


def halves(name: str, tensor: torch.Tensor, at: int) -> list[Shard]:
    columns = tensor.shape[1]
    return [
        Shard(name, ((0, at), (0, columns)), tensor[:at]),
        Shard(name, ((at, len(tensor)), (0, columns)), tensor[at:]),
    ]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "policy/weight/a": torch.randn(6, 4).bfloat16(),
        "policy/exp_avg/a": torch.randn(6, 4),
        "rng/0/torch": torch.randint(0, 255, (5, 3), dtype=torch.uint8),
        "rng/0/numpy": torch.randint(0, 2**40, (4, 2)),
    }


def test_any_safetensors_reader_opens_it(tensors, tmp_path):
    tensors["state/empty"] = torch.zeros(0, 1, dtype=torch.int32)
    shards = in_file_order([Shard(name, ((0, len(t)), (0, t.shape[1])), t) for name, t in tensors.items()])
    written = write_shards(tmp_path / "a", shards)
    assert written.bytes == (tmp_path / "a").stat().st_size > num_bytes(shards)
    check_file(tmp_path / "a", written, contents=True)
    read = load_file(tmp_path / "a")
    assert read.keys() == {shard.key for shard in shards}
    assert torch.equal(read["policy/weight/a[0:6,0:4]"], tensors["policy/weight/a"])
    assert all(torch.equal(read[shard.key], shard.tensor) for shard in shards)


def test_a_view_is_written_with_its_own_elements(tmp_path):
    tensor = torch.randn(4, 6)[:, 1:3]
    write_shards(tmp_path / "a", [Shard("t", ((0, 4), (1, 3)), tensor)])
    assert torch.equal(load_file(tmp_path / "a")["t[0:4,1:3]"], tensor)


def test_a_box_is_read_from_several_ranks_files(tensors, tmp_path):
    for rank in range(2):
        shards = in_file_order(halves(name, t, 2)[rank] for name, t in tensors.items())
        write_shards(tmp_path / f"{rank}", shards)
    reader = ShardReader(tmp_path, read_index(tmp_path, ["0", "1"]))
    for name, tensor in tensors.items():
        out = torch.zeros_like(tensor[1:4, 1:2])
        reader.fill(name, ((1, 4), (1, 2)), out)
        assert torch.equal(out, tensor[1:4, 1:2])


def test_a_gap_is_an_error_that_names_the_tensor(tensors, tmp_path):
    write_shards(tmp_path / "0", halves("policy/weight/a", tensors["policy/weight/a"], 2)[1:])
    reader = ShardReader(tmp_path, read_index(tmp_path, ["0"]))
    with pytest.raises(ValueError, match="has only 16 of the 24 numbers of policy/weight/a"):
        reader.fill("policy/weight/a", ((0, 6), (0, 4)), torch.zeros(6, 4))
    with pytest.raises(ValueError, match="has only 0 of the 24 numbers"):
        reader.fill("policy/weight/b", ((0, 6), (0, 4)), torch.zeros(6, 4))


def test_flipped_bits_and_missing_bytes_are_found(tmp_path):
    path = tmp_path / "a"
    written = write_shards(path, [Shard("t", ((0, 3),), torch.randn(3))])
    check_file(path, written, contents=True)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        check_file(path, written, contents=False)
        with pytest.raises(DamagedError, match="a is damaged: its checksum"):
            check_file(path, written, contents=True)
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match=f"has {len(whole) - 1} bytes, but {len(whole)} were written"):
        check_file(path, written, contents=False)
    path.unlink()
    with pytest.raises(DamagedError, match="a is missing"):
        check_file(path, Written(1, 1), contents=False)


def test_a_file_that_cannot_be_read_is_damaged(tmp_path):
    """EIO and a directory ended the run, and with it the use of older checkpoints."""
    (tmp_path / "eio").symlink_to("/proc/self/mem")
    (tmp_path / "directory").mkdir()
    own = (tmp_path / "directory").stat().st_size
    for name, size, text in (("eio", 0, "Input/output error"), ("directory", own, "Is a directory")):
        with pytest.raises(DamagedError, match=f"{name} cannot be read: {text}"):
            check_file(tmp_path / name, Written(size, 0), contents=True)


def test_a_file_without_permission_is_refused_with_the_remedy(tmp_path):
    """The system's message was shown alone."""
    with pytest.raises(PermissionError, match="a.safetensors cannot be read: .*; correct its permissions"):
        with reading(tmp_path / "a.safetensors"):
            raise PermissionError(13, "Permission denied")
