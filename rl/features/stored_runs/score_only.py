"""`run.mode=score_only`: apply the reward function to stored rollouts, and print what differs.

Runs in one process without torch.distributed, Megatron, vLLM or a model. It reads the rollouts of
`run.rollouts`, else of `run.dir`, and writes nothing. The stored scores of a reward model and a judge are
used, with their present coefficients.
"""

import json
from pathlib import Path
from typing import Any

from rl.config.options import ConfigError
from rl.config.reward import Reward
from rl.config.reward_sources import make_plan
from rl.config.schema import Config
from rl.rewards.pool.pool import scoring_pool
from rl.rewards.score import Score
from rl.run_directory.rollout_files import ground_truth, read, stored_steps
from rl.run_directory.status import refuse_missing

COLUMNS = (
    "group",
    "sample",
    "prompt",
    "response",
    "data_source",
    "ground_truth",
    "ground_truth_is_json",
    "extra_info",
    "score",
    "score_details",
)
SHOWN = 5
"""Maximum number of changed samples that are printed for a step."""
SHOWN_CHARS = 100
"""Number of characters printed of a response, its last ones."""


def score_only(config: Config) -> int:
    """Score the stored rollouts of every step; return the exit code. Raises ValueError for invalid input."""
    run_dir, reward = config.run.rollouts or config.run.dir, config.reward
    files = stored_steps(run_dir)
    if not files:
        if not config.run.rollouts and not Path(run_dir).is_dir():
            raise ConfigError(
                f"run.mode=score_only, but there is no directory run.dir={run_dir}; name the directory of a "
                "run in run.rollouts (lockstep status lists the runs)."
            )
        refuse_missing(run_dir, "run.rollouts=")
        raise ConfigError(
            f"run.mode=score_only, but {run_dir} holds no rollouts; name the directory of a run with "
            "logging.rollouts=sample or all in run.rollouts."
        )
    totals: list[tuple[float, float]] = []
    plan = make_plan(reward.function, reward.kwargs, reward.sources)
    with scoring_pool(plan, reward, local_world_size=1) as pool:
        pool.check()
        for step, path in files.items():
            rows = _whole(read(path, [*COLUMNS]).to_pylist())
            scores = pool.score([_asked(row) for row in rows], logs=False)
            if not totals and rows and len(pool.failures) == len(rows):
                raise ConfigError(
                    f"{pool.name} failed for all {len(rows)} samples of step {step}; first cause: "
                    f"{pool.failures[0].rstrip('.')}; correct it (reward.in_process=true calls "
                    "it in this process, where a debugger can stop)."
                )
            pool.log_failures()
            pairs = [(row["score"], _with_models(reward, row, score)) for row, score in zip(rows, scores)]
            totals += pairs
            changed = [i for i, (old, new) in enumerate(pairs) if not _same(old, new)]
            print(f"step {step}: {_summary(pairs)}", flush=True)
            for i in changed[:SHOWN]:
                row, (old, new) = rows[i], pairs[i]
                end = " ".join(row["response"].split())[-SHOWN_CHARS:]
                where = f"group {row['group']} sample {row['sample']}"
                print(f"  {where}: {old:g} -> {new:g} | ground truth {row['ground_truth']} | {end}")
            if len(changed) > SHOWN:
                print(f"  and {len(changed) - SHOWN} more")
    print(f"all steps: {_summary(totals)}")
    return 0


def _whole(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last row of each sample: its response is scored. Samples without a score are left out."""
    last = {(row["group"], row["sample"]): row for row in rows if row["score"] is not None}
    return list(last.values())


def _asked(row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the reward function."""
    names = ("prompt", "response", "data_source")
    truth = ground_truth(row["ground_truth"], row["ground_truth_is_json"])
    return {name: row[name] for name in names} | {
        "ground_truth": truth,
        "extra_info": json.loads(row["extra_info"]),
    }


def _with_models(reward: Reward, row: dict[str, Any], score: Score) -> float:
    """Return the score plus the stored scores of the reward model and the judge."""
    value, details = score.values["score"], json.loads(row["score_details"])
    for name, model in (("reward_model", reward.model), ("judge", reward.judge)):
        if not model.path:
            continue
        if name in details:
            value += model.coef * details[name]
        elif details.get("failed"):  # the judge
            return reward.failure_score
        else:
            key = name.replace("reward_", "")
            raise ConfigError(
                f"the stored samples have no score of reward.{key}.path={model.path}, which "
                "run.mode=score_only does not compute; leave it out."
            )
    return reward.failure_score if score.values["failed"] else value


def _same(old: float, new: float) -> bool:
    return abs(old - new) <= 1e-6 * max(1.0, abs(old))  # the stored score is a float32


def _summary(pairs: list[tuple[float, float]]) -> str:
    changed = sum(not _same(old, new) for old, new in pairs)
    means = [sum(column) / max(1, len(pairs)) for column in zip(*pairs)] or [0.0, 0.0]
    return f"{len(pairs)} samples, {changed} changed, mean score {means[0]:.4f} -> {means[1]:.4f}"
