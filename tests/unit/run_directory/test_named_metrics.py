"""Keys that name a metric: a name that no run logs is refused before the run begins."""

import pytest

from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.run_directory.named_metrics import check_named_metrics, metrics_help

RULE = ("sweep.stop=median", 'sweep.adapters=[{"run.seed": 1}]')
BEST = ("checkpoint.keep_best=1", "validation.every=2", "data.val=[d]")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((*RULE, "sweep.metric=critic/scores/mean"), "sweep.metric=.* did you mean critic/score/mean"),
        ((*RULE, "sweep.metric=val-core/math/acc/mean@1"), "validation, which this run does not have"),
        ((*BEST, "checkpoint.best_metric=val/los"), "checkpoint.best_metric=.* did you mean val/loss"),
    ],
)
def test_a_metric_that_no_run_logs_is_refused(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        check_named_metrics(load_config(None, ["algorithm=grpo", *overrides]))


def test_metrics_of_runs_and_of_user_algorithms_are_accepted(tmp_path):
    (tmp_path / "own.py").write_text(
        'NEEDS = ("samples",)\nDEFAULTS = {}\ndef collect(p): ...\ndef learn(p, b): ...\n'
    )
    for overrides in (
        ("algorithm=grpo", *RULE, "sweep.metric=reward/format/mean"),
        ("algorithm=grpo", *RULE, *BEST[1:], "sweep.metric=val-core/math/acc/mean@1"),
        (f"algorithm={tmp_path}/own.py", *RULE, "sweep.metric=own/progress"),
        ("algorithm=grpo", "checkpoint.best_metric=unused"),
    ):
        check_named_metrics(load_config(None, overrides))


def test_help_finds_metrics_by_a_word_of_their_name():
    text = metrics_help("ClipFrac")
    assert "actor/pg_clipfrac\n" in text and "Above about 0.3: many tokens give no gradient" in " ".join(
        text.split()
    )
    assert metrics_help("score/mean").splitlines()[1].strip() == "critic/score/{mean,max,min}"
    assert metrics_help("no such metric") == ""
