"""A run that sends only changed elements of the weights from training to generating ranks."""

import pytest

from tests.records import comparable
from tests.toy import train, write_config

ROLES = ("roles.train=0-0", "roles.rollout=1-1", "roles.lag=0", "rollout.deterministic=true")
BYTES = "perf/refit_bytes_"


@pytest.mark.slow
def test_a_small_learning_rate_moves_few_bytes_and_the_same_weights(toy, tmp_path):
    options = ("model.dtype=bfloat16", "training.optimizer.lr=1e-6", "refit.check_every=1")
    config = write_config(tmp_path, toy, *ROLES, *options)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(2, config, "run.max_steps=20", run=whole)
    train(2, config, "refit.changed_only=true", "checkpoint.every=10", "run.max_steps=10", run=parts)
    found = train(2, config, "refit.changed_only=true", "run.max_steps=20", run=parts)
    kept = [
        [{k: v for k, v in r.items() if BYTES not in k} for r in comparable(run)] for run in (whole, parts)
    ]
    assert kept[0] == kept[1]  # every token of 20 generations, and with it every weight that mattered
    sent = [record[f"{BYTES}received"] / record[f"{BYTES}unabridged"] for record in found]
    print([round(share, 4) for share in sent])
    print(sum(r[f"{BYTES}received"] for r in found), sum(r[f"{BYTES}unabridged"] for r in found))
    assert sent[0] > 1 < sent[10] and max(sent[1:10] + sent[11:]) < 0.5
