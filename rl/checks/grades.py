"""Checks that scores are the workers' answers, and their arguments those of the samples' rows and responses.

The workers seal each score together with the arguments of its call (`rl.rewards.score.sealed`).
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rl.checks.batches import CheckFailed, place
from rl.checks.few_samples import some
from rl.checks.known_grades import check_known_grades
from rl.config.reward_sources import Component, RewardPlan
from rl.config.schema import Config, Data
from rl.data.batch import Batch
from rl.data.completeness import SWITCH
from rl.data.prompts import AGENT_COLUMNS, GROUND_TRUTH, Prompt, value_at
from rl.data.reading import MESSAGES, read_row, row_bytes
from rl.data.rendering import check_rendering
from rl.data.special_tokens import special_ids
from rl.faults.agreement import fail_together
from rl.rewards.mixture import short_names
from rl.rewards.score import Score, digest, sealed

TOLERANCE = 1e-6
"""Rounding of a score in float32, relative to its size and that of its parts."""
NUM_COMPARED = 8
"""Samples of each rank and step whose arguments are rendered again, if their rows are cheap to read."""
READ_BYTES = 8 << 20
"""Mean number of bytes of files that a rank decodes in a step for these comparisons, some 20 ms."""


def calls_of(plan: RewardPlan, sample: Mapping[str, Any]) -> list[tuple[str, float, Mapping[str, Any]]]:
    """Return the calls that score a sample, as `rl.rewards.score.digest` reads them."""
    components = _components(plan, sample)
    return [(each.function, each.weight, {**each.kwargs, **sample}) for each in components]


def _components(plan: RewardPlan, sample: Mapping[str, Any]) -> Sequence[Component]:
    """Return the reward functions of a sample's source."""
    return plan.sources.get(sample["data_source"], plan.default)


def check_places(ids: Sequence[np.ndarray], again: Mapping[int, np.ndarray], name: str) -> None:
    """Raise CheckFailed unless a model that scores reads the samples in the order of the batch. Collective.

    ids: the tokens that it reads for each sample. again: sample -> its tokens, rendered again on this rank.
    """
    with fail_together():
        if wrong := [sample for sample, own in again.items() if not np.array_equal(ids[sample], own)]:
            raise CheckFailed(
                f"score check: the {name} reads other tokens for sample {wrong[0]} than those of its prompt "
                "and response: samples, and so scores, are in another order."
            )


class Grades:
    """Checks the scores of a batch against the answers of the workers."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        kept: Collection[int],
        plan: RewardPlan | None,
    ):
        self._config, self._plan = config.reward, plan
        self._arguments = Arguments(config.data, tokenizer, kept)
        self.answers: dict[int, tuple[dict, Score]] = {}
        """This rank's sample -> the arguments that were sent for it, and the answer."""
        if plan is not None:
            check_known_grades(plan)

    def check(self, batch: Batch, found: Sequence[str | None] | None = None) -> None:
        """Raise CheckFailed unless the batch has the workers' scores, for the samples' own arguments.

        found: the answer in each response, in the order of the batch. Collective over the world.
        """
        whole = batch.merge_rows()
        with fail_together():
            for sample, (given, score) in self.answers.items():
                if problem := self._problem(whole, sample, given, score):
                    raise CheckFailed(f"score check: {problem}.")
                texts = {"answer": (found, score.prediction), "feedback": (batch.feedback, score.feedback)}
                for what, (column, own) in texts.items() if batch.trajectories is None else ():
                    if column is not None and column[sample] != own:
                        raise CheckFailed(
                            f"score check: {place(whole, sample)} has the {what} {column[sample]!r:.80}, but "
                            f"the worker found {own!r:.80}: they are in another order than samples."
                        )
            self._arguments.check(whole, {sample: given for sample, (given, _) in self.answers.items()})

    def _problem(self, batch: Batch, sample: int, given: dict, score: Score) -> str:
        """Return what is wrong if the score was not computed from these arguments, or is not in the batch."""
        assert self._plan is not None
        name, rank, own = place(batch, sample), dist.get_rank(), score.values["score"]
        calls = calls_of(self._plan, given)
        is_own = score.values["failed"] or score.seal == sealed(score, digest(calls)).seal
        if not is_own:
            what = "of another sample" if score.seal >= 0 else "that no worker computed"
            text = f"rank {rank} got the score {own:.4g} for {name}, {what}"
            return f"{text}: answers, or their texts, were exchanged or changed, or are of other arguments"
        terms = [weight * part for (_, weight, _), part in zip(calls, score.parts)]
        if not score.values["failed"] and abs(own - sum(terms)) > TOLERANCE * sum(map(abs, terms)):
            return (
                f"{name} has the score {own:.6g}, but its reward functions gave {score.parts}, which their "
                f"weights {[weight for _, weight, _ in calls]} make {sum(terms):.6g}"
            )
        names = short_names(_components(self._plan, given))
        accs = [value for name in names if (value := score.values.get(f"{name}/acc")) is not None]
        if len(score.parts) > 1 and accs and score.values.get("acc") != accs[0]:
            return f"{name} has the acc {score.values.get('acc')}, but its reward functions gave {accs}"
        if not self._is_filed(batch, sample, score):
            filed = float(batch.column("scores")[sample])
            return f"{name} has the score {filed:.6g}, but the worker of rank {rank} returned {own:.6g}"
        return ""

    def _is_filed(self, batch: Batch, sample: int, score: Score) -> bool:
        """Return whether the batch has a score, with the parts of the reward model and the judge."""
        filed = {"score": batch.column("scores")} | batch.score_details
        if filed["failed"][sample]:
            return float(filed["score"][sample]) == np.float32(self._config.failure_score)
        values, size = {name: value for name, value in score.values.items() if name in filed}, 0.0
        model, judge = self._config.model, self._config.judge
        coefs = {"reward_model": model.coef if model.path else 0, "judge": judge.coef if judge.path else 0}
        for name, coef in coefs.items():
            if name in filed and coef:
                part = coef * float(filed[name][sample])
                values["score"], size = values["score"] + part, size + abs(part)
                values.pop(name, None)
        return all(
            abs(float(filed[name][sample]) - value) <= TOLERANCE * (abs(value) + size)
            for name, value in values.items()
        )


class Arguments:
    """Renders the arguments of reward functions again. kept: ids of special tokens that a text keeps."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerBase, kept: Collection[int]):
        self._data, self._tokenizer = data, tokenizer
        self._dropped = sorted(special_ids(tokenizer) - set(kept))
        self._credit = READ_BYTES
        """Bytes that may still be read."""

    def affords(self, batch: Batch, sample: int) -> bool:
        """Return whether the row of a sample may be read now, and then count its bytes."""
        place = batch.prompts[int(batch.groups[sample])].place
        cost = row_bytes(place) if place else 0
        if cost > self._credit:
            return False
        self._credit -= cost
        return True

    def of(self, batch: Batch, sample: int) -> dict[str, Any]:
        """Return the arguments for a sample. A prompt that is of no file keeps its own fields."""
        prompt = batch.prompts[int(batch.groups[sample])]
        ids = batch.response_ids[sample]
        if batch.turns is not None:
            turns = batch.turns[batch.offsets[sample] : batch.offsets[sample + 1]].numpy()
            ids = ids[turns == max(1, turns.max(initial=1))]
        ids = ids[~np.isin(ids, self._dropped)]
        text = self._tokenizer.decode(ids, skip_special_tokens=False) if len(ids) else ""
        found = {"prompt": prompt.text, "response": text, "ground_truth": prompt.ground_truth}
        found |= {"data_source": prompt.data_source, "extra_info": prompt.extra_info}
        if prompt.place:
            file_row = read_row(prompt.place)
            row = file_row.values
            found["ground_truth"] = value_at(
                file_row, (self._data.ground_truth_key or GROUND_TRUTH).split(".")
            )
            found["data_source"] = str(row.get("data_source") or file_row.file_name)
            agent = {name: row[name] for name in AGENT_COLUMNS if row.get(name) is not None}
            info = row | (row.get("extra_info") or {}) | agent
            names = dict.fromkeys((*prompt.extra_info, *(row.get("extra_info") or {}), *agent))
            found["extra_info"] = {name: info.get(name) for name in names}
        return found

    def check(self, batch: Batch, given: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise CheckFailed if a reward function got other arguments than those of the sample and its row.

        given: the arguments that this rank sent, by sample; about NUM_COMPARED are compared.
        """
        self._credit += READ_BYTES
        prompts: dict[int, Prompt] = {}
        for sample in some(sorted(given), NUM_COMPARED, batch.fingerprint):
            if not self.affords(batch, sample):
                continue
            again, group = self.of(batch, sample), int(batch.groups[sample])
            for name, value in given[sample].items():
                if json.dumps(value, default=repr) != json.dumps(again[name], default=repr):
                    raise CheckFailed(
                        f"score check: the reward function got the {name} {value!r:.80} for "
                        f"{place(batch, sample)}, but its row and its response ids give {again[name]!r:.80}."
                    )
            prompts[group] = batch.prompts[group]
        for prompt in prompts.values():
            if batch.turns is None and prompt.place:
                self.check_prompt(prompt)

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise CheckFailed unless the prompt renders its row, and ValueError unless it has its tokens."""
        content: Any = read_row(prompt.place).values.get(self._data.prompt_key)
        if prompt.messages is not None:
            is_text = isinstance(content, str)
            if not is_text or MESSAGES.match(content):  # else a text of data.string_prompts=user
                chat = json.loads(content) if is_text else content
                last = chat[-1] if isinstance(chat, list) and chat else {}
                content = last.get("content", last.get("value"))
        has_text = isinstance(content, str) and not prompt.images
        if has_text and _bare(content) not in _bare(prompt.text):
            raise CheckFailed(
                f"prompt check: prompt {prompt.index} does not contain the text of {prompt.place}, "
                f"{content!r:.80}: prompts and rows are in another order."
            )
        most = self._data.max_prompt_tokens
        check_rendering([prompt], self._tokenizer, key="the data", max_prompt_tokens=most)


def _bare(text: str) -> str:
    return "".join(SWITCH.sub("", text).split())
