"""Scores of responses by the reward function, a reward model and a judge."""

import json
import math
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl.checks.few_samples import some
from rl.checks.grades import Grades, check_places
from rl.checks.reference import SecondPass
from rl.config.needs import needs_feedback
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.chat_template import ChatTemplate, kept_ids
from rl.data.messages import Messages
from rl.data.prompts import Prompt, end_token_ids
from rl.data.special_tokens import decode_responses, encode, hide
from rl.engines.engines import Engines
from rl.engines.inputs import Inputs
from rl.phases.truths import arguments, check_truths
from rl.rewards.pool.pool import ScoringPool, scoring_pool
from rl.rewards.score import to_finite
from rl.rollout.batches import batch_of
from rl.rollout.engine import RolloutEngine
from rl.rollout.exchange import exchange
from rl.rollout.sampling import Sampling, seed_of
from rl.runtime import tracing
from rl.runtime.collectives import gather_objects, is_same_on_all_ranks, sum_over_world
from rl.runtime.device import Device
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import plan_minibatch
from rl.workers.messages import place_of, sentence_of, shown

Response = tuple[Prompt, str, Messages]
"""A prompt, the text of a response to it, and the conversation of a trajectory, empty for one turn."""
ENOUGH = 64
"""Smallest number of samples whose share of failures is compared with `reward.max_failed_share`."""


class Scorer:
    """Scores batches.

    Each rank calls the reward function on every world-size-th sample, in its own worker processes. For
    example, rank 1 of 4 scores samples 1, 5, 9, ... A reward model and a judge run on all ranks together.
    """

    def __init__(self, config: Config, inputs: Inputs, device: Device, engines: Engines, pool: ScoringPool):
        self.config, self.device, self.tokenizer, self.pool = config.reward, device, inputs.tokenizer, pool
        self.keeps_feedback = needs_feedback(config)
        self.micro_batch_tokens, self.seed = config.training.row_tokens, config.run.seed
        self.tokenizers, self.parse_grade = inputs.tokenizers, inputs.judge_parser
        self.kept, self.slack = inputs.kept_ids, config.agreement.logprob_slack
        self.grades = Grades(config, inputs.tokenizer, inputs.kept_ids, inputs.rewards)
        self.model = engines.training.get("reward_model")
        self.judge = engines.generating.get("judge")
        self.first_cause: str = ""
        """Cause of this batch's first failed call on this rank."""
        self.succeeded: set[bool] = set()
        """Kinds of batches that had at least one score: False for training, True for validation."""
        self.num_scored = self.num_failed = 0
        """Samples of all batches so far that a function, a model or a judge scored, and failures of them."""
        self.recent: list[Tensor] = []
        """Training samples since the last comparison with `reward.max_failed_share`: whether each failed."""

    @property
    def has_models(self) -> bool:
        """Whether a reward model or a judge scores. If so, the policy's engine sleeps during the scoring."""
        return self.model is not None or self.judge is not None

    def score(
        self, batch: Batch, *, predictions: bool, is_validation: bool
    ) -> tuple[dict[str, Tensor], list[str | None] | None]:
        """Return the scores as columns float32 [N] and, if `predictions`, the answer found in each response.

        The columns are `score`, `failed` (0 or 1) and the other numbers that the reward function returns. An
        element is NaN where the function returned no such number for the sample. The score of an environment,
        if `score_details` holds it, replaces the reward function's score. In a response of several turns the
        reward function scores the last turn; reward model and judge score the whole conversation. Collective
        over the world.
        """
        if batch.trajectories is not None:
            whole = batch.merge_rows()
            columns, answers = self.score(whole, predictions=predictions, is_validation=is_validation)
            place = batch.of_trajectories(torch.arange(len(whole)))
            answers = answers and [answers[i] for i in place.tolist()]
            batch.feedback = whole.feedback and [whole.feedback[i] for i in place.tolist()]
            return {name: column[place] for name, column in columns.items()}, answers
        world, rank = dist.get_world_size(), dist.get_rank()
        mine = list(range(rank, len(batch), world))
        own = self._responses(batch, mine)
        given = batch.score_details.get("score")
        asked = [k for k, i in enumerate(mine) if given is None or given[i].isnan()]
        samples = [arguments(*own[k][:2]) for k in asked]
        self.pool.on_answer = None if tracing.active is None else tracing.active.add_reward
        with tracing.span("reward function", samples=len(samples)):
            scores = self.pool.score(samples, logs=False)
        self.first_cause = next(iter(self.pool.failures.values()), "")
        owned = [mine[k] for k in asked]
        self.grades.answers = dict(zip(owned, zip(samples, scores, strict=True)))
        columns = gather_columns([score.values for score in scores], owned, len(batch), self.device)
        found = dict(zip(asked, scores))
        if self.keeps_feedback:
            batch.feedback = gather_by_rank(
                [found[k].feedback if k in found else None for k in range(len(mine))]
            )
        answers = None
        if predictions:
            answers = gather_by_rank([found[k].prediction if k in found else None for k in range(len(mine))])
        if given is not None:
            columns = _joined(batch.score_details, columns)
        called = torch.full((len(batch),), given is None or self.has_models)
        called = called if given is None else called | given.isnan()
        seed = batch.fingerprint + dist.get_rank()  # each rank compares others
        places = some(range(len(batch)), 4, seed) if self.has_models else []
        others = dict(zip(places, self._responses(batch, places)))
        if self.model is not None:
            given = self._model_scores(self.model, own, others)
            columns |= {"reward_model": given, "score": columns["score"] + self.config.model.coef * given}
        if self.judge is not None:
            given, failed = self._judge_scores(self.judge, own, others)
            columns["judge"] = torch.where(failed > 0, torch.nan, given)
            columns["failed"] = torch.maximum(columns["failed"], failed)
            columns["score"] = columns["score"] + self.config.judge.coef * given
        broken = ~columns["score"].isfinite()  # NaN of a reward model, or a sum that float32 cannot hold
        failed = (columns["failed"] > 0) | broken
        columns["failed"] = failed.float()
        self._count_failures(failed[called], is_validation)
        self.pool.log_failures()
        columns["score"] = columns["score"].masked_fill(failed, self.config.failure_score)
        if "acc" in columns:  # a failed sample counts as wrong
            columns["acc"] = columns["acc"].masked_fill(failed, 0.0)
        return columns, answers

    def warning(self) -> str:
        """Return a warning with the number of samples that failed so far; "" without any."""
        if not self.num_failed:
            return ""
        name = "the reward" if self.has_models else self.pool.name
        return (
            f"warning: {name} failed for {self.num_failed} of {self.num_scored} samples since this start "
            f"(reward/failures), which got the score {self.config.failure_score:g}; the log has the first "
            "error: make the function handle every response."
        )

    def _count_failures(self, failed: Tensor, is_validation: bool) -> None:
        """Count failures. Raise ConfigError if every call of the first batch failed, because all scores would
        be equal, or a larger share of the last ENOUGH training samples than `reward.max_failed_share`.

        failed: bool, one element per sample that a function, a model or a judge scored. Collective over the
        world.
        """
        self.num_scored += len(failed)
        self.num_failed += int(failed.sum())
        if not len(failed):
            return
        if is_validation not in self.succeeded and failed.all():
            raise self._too_many_failures(f"all {len(failed)} samples of the first batch", "")
        self.succeeded.add(is_validation)
        if is_validation:
            return
        self.recent.append(failed)
        recent, limit = torch.cat(self.recent), self.config.max_failed_share
        if len(recent) < ENOUGH:
            return
        self.recent = []
        if (num_failed := int(recent.sum())) > limit * len(recent):
            raise self._too_many_failures(
                f"{num_failed} of the last {len(recent)} samples",
                f", more than reward.max_failed_share={limit:g} of them",
            )

    def _too_many_failures(self, which: str, limit: str) -> ConfigError:
        """Return an error that names the first cause on any rank. Collective over the world."""
        causes = gather_objects(self.first_cause)
        cause = next(filter(None, causes), "the reward model or the sum is not finite").rstrip(".")
        return ConfigError(
            f"{'the reward' if self.has_models else self.pool.name} failed for {which}{limit}; first cause: "
            f"{cause}; correct it (run.mode=score_only tries a function on stored samples, and "
            "reward.in_process=true calls it in the rank, where a debugger can stop)."
        )

    def _responses(self, batch: Batch, samples: list[int]) -> list[Response]:
        texts = decode_responses([batch.last_turn(i) for i in samples], self.tokenizer, self.kept)
        chats = [batch.conversations[i] if batch.conversations else [] for i in samples]
        return list(zip([batch.prompts[int(batch.groups[i])] for i in samples], texts, chats))

    def _model_scores(
        self, model: TrainingEngine, own: list[Response], others: dict[int, Response]
    ) -> Tensor:
        """Return the reward model's value at the last token of each conversation, float32 [N].

        own: this rank's responses. others: responses by their sample, which are rendered again.
        """
        render = partial(_conversation, self.tokenizers["reward_model"])
        ids = gather_by_rank([render(*response) for response in own])
        check_places(ids, _rendered_again(render, others, self.tokenizers["reward_model"]), "reward model")
        # One dummy response token: its value is read at the last token of the conversation.
        end = np.zeros(1, np.int32)
        count = len(ids)
        conversations = Batch(
            ids, [end] * count, groups=torch.arange(count), truncated=torch.zeros(count, dtype=torch.bool)
        )
        plan = plan_minibatch(
            conversations,
            list(range(count)),
            dp=model.grid.dp,
            max_tokens=self.micro_batch_tokens,
            multiple=model.grid.micro_batch_multiple,
        )
        (values,) = model.forward(conversations, [plan], ("values",))
        second = SecondPass(model, self.slack, "the reward model")
        second.take(conversations, plan)
        second.check(conversations, values, is_same=True)
        return values

    def _judge_scores(
        self, engine: RolloutEngine, own: list[Response], others: dict[int, Response]
    ) -> tuple[Tensor, Tensor]:
        """Return (grade, failed) of each response, float32 [N] each; the grade is 0 where `failed` is 1.

        own, others: as for `_model_scores`.
        """
        judge, tokenizer, parse = self.config.judge, self.tokenizers["judge"], self.parse_grade
        assert parse is not None

        def render(prompt: Prompt, text: str, chat: Messages) -> np.ndarray:
            parts = _parts(prompt, text, chat)
            return _question(tokenizer, judge.template.format(ground_truth=prompt.ground_truth, **parts))

        ids = gather_by_rank([render(*response) for response in own])
        check_places(ids, _rendered_again(render, others, tokenizer), "judge")
        asked = [i for i, tokens in enumerate(ids) if len(tokens) <= judge.max_prompt_tokens]
        sampling = Sampling(1, judge.max_response_tokens, temperature=judge.temperature)
        questions_asked = [ids[i] for i in asked]
        engine.wake_weights()
        engine.wake_cache()
        samples = engine.generate(questions_asked, sampling, [seed_of(self.seed, "judge", i) for i in asked])
        engine.sleep()
        assert samples is not None
        answers = batch_of(exchange(samples, self.device), questions_asked, samples_per_prompt=1)
        values, failed = torch.zeros(len(ids)), torch.ones(len(ids))
        kept = kept_ids(tokenizer, ["auto"], end_token_ids(judge.path))
        for i, text in zip(asked, decode_responses(answers.response_ids, tokenizer, kept)):
            try:
                grade = to_finite(found := parse(text))
                place = f"reward.judge.parser {place_of(parse)}"
                cause = f"{place} must return a finite number of float32, not {shown(found)}"
            except Exception as error:  # a user's parser may raise anything; only this sample's grade is lost
                grade, cause = None, f"reward.judge.parser raised {sentence_of(error)}"
            if grade is None:
                self.first_cause = self.first_cause or cause
            else:
                values[i], failed[i] = grade, 0.0
        if not asked:
            self.first_cause = (
                f"every question is above reward.judge.max_prompt_tokens={judge.max_prompt_tokens}"
            )
        return values, failed


def start_pool(config: Config, inputs: Inputs) -> ScoringPool:
    """Start this rank's worker processes. Not collective.

    Call it before the engines are built, because they pin this thread to a core. Raises ValueError if a
    worker cannot load the reward functions within its limits, or cannot grade a ground truth.
    """
    assert inputs.rewards is not None
    own_cores = "SLURM_CPUS_PER_TASK" in os.environ  # the task is bound to its cores
    shared = 1 if own_cores else int(os.environ["LOCAL_WORLD_SIZE"])
    pool = scoring_pool(inputs.rewards, config.reward, local_world_size=shared)
    try:
        pool.check()
        check_truths(config, inputs, pool)
    except ValueError:
        pool.shutdown()
        raise
    return pool


def gather_by_rank(mine: list) -> list:
    """Return the items of all ranks in sample order; rank r of W gives the items of samples r, r + W, ...

    Collective over the world.
    """
    everyone, world = gather_objects(mine), dist.get_world_size()
    return [everyone[i % world][i // world] for i in range(sum(map(len, everyone)))]


def gather_columns(
    results: list[dict[str, float]], mine: list[int], total: int, device: Device
) -> dict[str, Tensor]:
    """Return every rank's results as columns float32 [total]. Collective over the world.

    An element is NaN where a sample lacks a number. mine: the samples of this rank's results.
    """
    names = sorted({name for result in results for name in result})
    if not is_same_on_all_ranks(repr(names)):
        names = sorted(set().union(*gather_objects(names)))
    table = torch.zeros(len(names), total, dtype=torch.float64)
    rows = [[result.get(name, math.nan) for result in results] for name in names]
    table[:, mine] = torch.tensor(rows, dtype=torch.float64).view(len(names), len(mine))
    return dict(zip(names, sum_over_world(table, device.torch).float()))


def _joined(given: dict[str, Tensor], computed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the environments' columns, filled up with computed scores where no environment gave a score."""
    scored = ~given["score"].isnan()
    missing = torch.full(scored.shape, torch.nan)
    columns = {}
    for name in dict.fromkeys([*given, *computed, "failed"]):
        own = given.get(name, missing)
        columns[name] = torch.where(scored | ~own.isnan(), own, computed.get(name, missing))
    return columns | {"failed": columns["failed"].nan_to_num(0.0)}


def transcript(messages: Messages) -> str:
    """Return messages as plain text, with their roles and tool calls.

    A chat template is not used, because its special tokens would end the user's message to the judge early.
    """
    return "\n\n".join(
        f"{'user' if message['role'] == 'text' else message['role']}: {message.get('content') or ''}"
        + "".join(
            f"\n[call] {json.dumps(call.get('function', call))}" for call in message.get("tool_calls") or []
        )
        for message in messages
    )


def _parts(prompt: Prompt, response: str, chat: Messages) -> dict[str, str]:
    """Return `prompt` and `response` of a question to the judge.

    The response of a trajectory is all of its conversation after the opening.

    chat: the conversation of a trajectory; empty for a response of one turn.
    """
    if not chat:
        return {"prompt": prompt.text, "response": response}
    start = next((i for i, message in enumerate(chat) if message["role"] == "assistant"), len(chat))
    return {"prompt": transcript(chat[:start]), "response": transcript(chat[start:])}


def _rendered_again(
    render: Callable[..., np.ndarray], others: dict[int, Response], tokenizer: PreTrainedTokenizerBase
) -> dict[int, np.ndarray]:
    """Return the tokens of other ranks' responses by their sample; none if the chat template writes the time,
    which may have changed since."""
    has_clock = tokenizer.chat_template is not None and bool(ChatTemplate(tokenizer).clock)
    return {} if has_clock else {sample: render(*response) for sample, response in others.items()}


def _conversation(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, response: str, chat: Messages
) -> np.ndarray:
    """Return token ids of prompt and response, or of a trajectory, by the reward model's tokenizer.

    chat: as in `_parts`. If the chat template rejects the conversation or would leave out its tool calls, the
    conversation becomes one user message. Special tokens come only from the template, or from a prompt that
    is a string.
    """
    if chat and tokenizer.chat_template is None:
        return _encode(hide(transcript(chat), tokenizer), tokenizer, add_special_tokens=True)
    template = ChatTemplate(tokenizer, keeps_marks=False)
    if chat:
        chat = [{**m, "role": "user"} if m["role"] == "text" else m for m in chat]
        try:
            if template.call_form is None and any(message.get("tool_calls") for message in chat):
                raise ValueError("the template has no tool calls")
            text = template.render(chat, generation_prompt=False)
        except ValueError:
            text = template.render([{"role": "user", "content": transcript(chat)}], generation_prompt=False)
        return _encode(text, tokenizer)
    if prompt.messages is None or tokenizer.chat_template is None:
        question = prompt.text if prompt.messages is None else hide(prompt.text, tokenizer)
        return _encode(question + hide(response, tokenizer), tokenizer, add_special_tokens=True)
    messages = [*prompt.messages, {"role": "assistant", "content": response}]
    return _encode(template.render(messages, prompt.tools, generation_prompt=False), tokenizer)


def _question(tokenizer: PreTrainedTokenizerBase, question: str) -> np.ndarray:
    """Return token ids of a question to the judge, as a user message."""
    if tokenizer.chat_template is None:
        return _encode(hide(question, tokenizer), tokenizer, add_special_tokens=True)
    return _encode(ChatTemplate(tokenizer).render([{"role": "user", "content": question}]), tokenizer)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = False) -> np.ndarray:
    return encode([text], tokenizer, add_special_tokens=add_special_tokens)[0][0]
