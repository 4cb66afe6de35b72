"""A run with draft tokens learns bitwise what it learns without them, also after a resume."""

import pytest

from tests.records import comparable
from tests.toy import train, write_config


@pytest.mark.slow
def test_a_run_with_drafts_learns_the_same(toy, tmp_path):
    config = write_config(tmp_path, toy, "rollout.top_p=0.9")
    draft = (f"rollout.draft.path={toy}/model", "rollout.draft.min_tokens_per_step=1", "checkpoint.every=2")
    plain, drafted = tmp_path / "plain", tmp_path / "drafted"
    train(2, config, "run.max_steps=4", run=plain)
    train(2, config, *draft, "run.max_steps=2", run=drafted)
    found = train(2, config, *draft, "run.max_steps=4", run=drafted)
    acceptance = [record["perf/draft_acceptance/1"] for record in found]
    assert acceptance[0] > 0.99 and all(0 < share <= 1 for share in acceptance)
    kept = [
        [{k: v for k, v in record.items() if "perf/draft" not in k} for record in comparable(run)]
        for run in (plain, drafted)
    ]
    assert kept[0] == kept[1]
