"""Arrays in the state of a run are written as shards and restored at their places."""

import json

import numpy as np

from rl.checkpoint.arrays import array_shards, restore_arrays, without_arrays
from rl.checkpoint.shards import ShardReader, in_file_order, read_index, write_shards

STATE = {
    "roles": {"batch": 3, "token_ids": np.zeros(0, np.int32), "groups": []},
    "carry_over": {
        "token_ids": np.array([-1, 2**31 - 1], np.int32),
        "logprobs": np.array([-0.1, -np.inf, 1e-45], np.float32),
    },
}


def test_arrays_of_a_state_are_restored(tmp_path):
    write_shards(tmp_path / "0.safetensors", in_file_order(array_shards(STATE)))
    state = json.loads(json.dumps(without_arrays(STATE)))
    assert state == {"roles": {"batch": 3, "groups": []}, "carry_over": {}}
    restore_arrays(state, ShardReader(tmp_path, read_index(tmp_path, ["0.safetensors"])))
    for section, values in STATE.items():
        assert state[section].keys() == values.keys()
        for name, value in values.items():
            found = state[section][name]
            if isinstance(value, np.ndarray):
                assert found.dtype == value.dtype and found.tobytes() == value.tobytes()
            else:
                assert found == value
