"""Batches from stored rollouts (`rl.run.rollout_writer`)."""

import json

import numpy as np
import torch

from rl.config.needs import needs_feedback
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.run.rollout_writer import FILE_COLUMNS, STORED
from rl.run_directory.rollout_files import ground_truth, read, stored_steps
from rl.run_directory.status import refuse_missing


class StoredBatches:
    """The batches of another run's steps, for `run.mode=train_only`. Every rank reads them.

    Raises ConfigError if the run has not stored every step up to run.max_steps. For example, a run that
    stopped after step 80 allows at most run.max_steps=80.
    """

    def __init__(self, config: Config):
        refuse_missing(config.run.rollouts, "run.rollouts=")
        self._files, self._needs_feedback = stored_steps(config.run.rollouts), needs_feedback(config)
        steps = range(1, config.run.max_steps + 1)
        missing = [step for step in steps if step not in self._files]
        if missing:
            raise ConfigError(
                f"run.rollouts={config.run.rollouts} holds rollouts of {len(self._files)} steps, and none of "
                f"step {missing[0]} of run.max_steps={config.run.max_steps}; set run.max_steps to at most "
                f"{missing[0] - 1}, or name a run with logging.rollouts=all."
            )

    def batch(self, step: int) -> Batch:
        """Return the batch of a step as `collect` returned it; with logging.rollouts=sample, a part of it."""
        table = read(self._files[step]).combine_chunks()
        lists = {name for name, kind in FILE_COLUMNS.items() if kind.endswith("s")}
        rows = {name: table.column(name).to_pylist() for name in FILE_COLUMNS if name not in lists}

        def split(name: str) -> list[np.ndarray]:
            arrays = [values.values.to_numpy() for values in table.column(name)]
            for row, array in enumerate(arrays):
                if not np.issubdtype(array.dtype, np.integer):
                    raise ConfigError(
                        f"{self._files[step]}, row {row}: {name} has values of type {array.dtype}; token "
                        "ids must be integers, so store the column as int32."
                    )
            return [array.astype(np.int32) for array in arrays]

        def tensor(name: str) -> torch.Tensor | None:
            column = STORED[name]
            values = table.column(column.stored_as or name).combine_chunks()
            if values.null_count or not len(values) and name not in ("groups", "truncated"):
                return None
            values = values.flatten() if column.is_per_token else values
            return torch.from_numpy(values.to_numpy(zero_copy_only=False).copy()).to(column.dtype)

        found = {name: tensor(name) for name, column in STORED.items() if not column.learned}
        columns = {name: column for name, column in found.items() if column is not None}
        for name in ("groups", "trajectories"):  # renumber: some groups of the step may not be stored
            if name in columns:
                columns[name] = columns[name].unique(return_inverse=True)[1]
        feedback = rows["feedback"] if any(text is not None for text in rows["feedback"]) else None
        if feedback is None and self._needs_feedback:
            raise ConfigError(
                f"{self._files[step]} holds no feedback, which teacher.template shows to the teacher; name a "
                "run with the same template in run.rollouts, or leave {feedback} out."
            )
        firsts = [rows["group"].index(group) for group in sorted(set(rows["group"]))]
        details = [json.loads(text) for text in rows["score_details"]]
        bare = Batch(
            prompt_ids=(prompt_ids := split("prompt_ids")),
            response_ids=split("response_ids"),
            groups=columns["groups"],
            truncated=columns["truncated"],
            prompts=[_prompt(rows, i, prompt_ids[i]) for i in firsts],
            score_details={
                name: torch.tensor([values.get(name, float("nan")) for values in details])
                for name in sorted({name for values in details for name in values})
            },
            feedback=feedback,
        )
        return bare.with_columns(columns)


def _prompt(rows: dict[str, list], i: int, token_ids: np.ndarray) -> Prompt:
    return Prompt(
        index=rows["prompt_index"][i],
        token_ids=token_ids,
        text=rows["prompt"][i],
        data_source=rows["data_source"][i],
        ground_truth=ground_truth(rows["ground_truth"][i], rows["ground_truth_is_json"][i]),
        extra_info=json.loads(rows["extra_info"][i]),
        messages=None if (chat := rows["prompt_messages"][i]) is None else json.loads(chat),
        tools=tuple(json.loads(rows["prompt_tools"][i] or "[]")),
    )
