"""Passes of the teachers: log-probs, distributions and responses of models from which the policy learns."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl.checks.few_samples import some
from rl.checks.reference import SecondPass
from rl.config.needs import needs_feedback
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.contexts import check_context, in_context
from rl.data.prompts import Prompt, end_token_ids
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.faults.agreement import fail_together
from rl.features.teachers.divergence import Targets, TeacherTargets, head_rows, top_k
from rl.features.teachers.other_tokens import OtherReader, ReadBatch
from rl.objectives.distillation import divergence_of, log_ratio_advantages
from rl.phases.batch_metrics import token_mean
from rl.phases.minibatches import MinibatchPlanner
from rl.phases.step_record import StepRecord
from rl.rollout.batches import batch_of
from rl.rollout.exchange import exchange
from rl.rollout.sampling import seed_of, train_sampling
from rl.training.engine import TrainingEngine
from rl.training.logprobs import Softmax
from rl.training.micro_batch_plans import MicroBatchPlan, samples_of
from rl.training.packing import MicroBatch

NUM_COMPARED = 4
"""Approximate number of samples of a step whose contexts are rendered again."""


class Teaching:
    """Passes of the teachers over a batch. Methods are collective over the world.

    Args:
        tokenizer: the policy's tokenizer; a self-taught policy reads its template with it.
        others: tokenizers of the teachers that have another one, by path.
    """

    def __init__(
        self,
        config: Config,
        step: StepRecord,
        engines: Engines,
        memory: MemorySharing,
        planner: MinibatchPlanner,
        tokenizer: PreTrainedTokenizerBase,
        others: Mapping[str, PreTrainedTokenizerBase],
    ):
        self._config, self._step, self._engines = config, step, engines
        self._memory, self._planner, self._tokenizer = memory, planner, tokenizer
        self._readers = {
            path: OtherReader(
                tokenizer,
                other,
                end_ids={tokenizer.eos_token_id, *end_token_ids(config.model.path)},
                max_tokens=engines.teachers[path].weight_map.hf["max_position_embeddings"],
            )
            for path, other in others.items()
        }

    def log_probs(self, batch: Batch) -> None:
        """Fill `teacher_logprobs`: log-prob of each token by the teacher of the sample's source.

        Without `teacher.advantage_coef` it fills nothing.
        """
        if not self._config.teacher.advantage_coef:
            return
        self._memory.to_training()
        total = torch.zeros(int(batch.lengths.sum()))
        with self._step.phase("log_probs", timing="teacher", batch=batch.hashes()):
            for _, model, read, plan, context in self._lessons(batch):
                with context:
                    (found,) = model.forward(read, [plan], ("logprobs",))
                    second = self._second(model, read, plan)
                second.check(read, found, is_same=True)
                if isinstance(read, ReadBatch):
                    found = read.in_policy_tokens(found, batch.column("old_logprobs"))
                total += found
        batch.extra["teacher_logprobs"] = total
        self._step.metrics["teacher/logprob/mean"] = token_mean(total, batch.column("mask"))

    def add_to_advantages(self, batch: Batch) -> None:
        """Add the part of `teacher_logprobs`, if they are filled, to the advantages, and log both sizes."""
        if "teacher_logprobs" not in batch.extra:
            return
        coef, mask = self._config.teacher.advantage_coef, batch.mask
        teacher_logprobs = batch.extra.pop("teacher_logprobs")  # a second update must not add it again
        advantages = batch.column("advantages")
        added = log_ratio_advantages(teacher_logprobs, batch.column("old_logprobs"), coef=coef)
        added = torch.where(mask > 0, added, 0.0)
        for name, part in {"reward": advantages, "teacher": added}.items():
            self._step.metrics[f"teacher/advantage_of_{name}/mean"] = token_mean(part, mask)
            self._step.metrics[f"teacher/advantage_of_{name}/abs"] = token_mean(part.abs(), mask)
        batch.advantages = advantages + added

    def distributions(self, batch: Batch) -> None:
        """Give the policy the distribution of each response token by the teacher of the sample's source."""
        self._memory.to_training()
        goal, policy = self._config.teacher, self._engines.policy
        teachers = [0] * len(batch)
        targets = Targets(divergence_of(goal.divergence, goal.beta), teachers, top_k=goal.top_k)
        part = policy.parts.get(TeacherTargets)
        assert part is not None
        part.given = batch, targets
        with self._step.phase("log_probs", timing="teacher", batch=batch.hashes()):
            for number, model, read, plan, context in self._lessons(batch):
                with context:
                    model.visit(read, plan, ("hidden",), partial(self._keep, targets, model))
                    if not goal.top_k and policy.grid.is_last_stage:
                        wanted, group = len(policy.chunks[-1].head_weight), policy.grid.groups.tp
                        targets.heads.append(head_rows(model.chunks[-1].head_weight, wanted, group))
                    second = self._second(model, read, plan, policy.chunks[-1].real_vocab_size)
                check = partial(self._check_targets, targets, number, model, second, read)
                check()
                second.cause = "they changed between that pass and the end of the update"
                targets.checks.append(check)
                if not goal.top_k:
                    for sample in samples_of(plan):
                        teachers[sample] = number

    def _second(
        self, model: TrainingEngine, read: Batch, plan: MicroBatchPlan, vocab_size: int = 0
    ) -> SecondPass:
        """Return the second pass of a teacher over one of its samples. Collective over the world.

        vocab_size: number of tokens that have a probability, if the teacher has more rows.
        """
        k = self._config.teacher.top_k
        name = "the teacher" + f"'s {k} most probable tokens and all others (teacher.top_k)" * bool(k)
        second = SecondPass(model, self._config.agreement.logprob_slack, name)
        last = model.chunks[-1]
        kept = last.real_vocab_size
        last.real_vocab_size = min(vocab_size or kept, kept)
        try:
            second.take(read, plan)
        finally:
            last.real_vocab_size = kept
        return second

    def _check_targets(
        self, targets: Targets, number: int, model: TrainingEngine, second: SecondPass, read: Batch
    ) -> None:
        """Check the targets of one sample against the teacher's log-probs. Collective over the world."""
        own, theirs, sample = self._engines.policy.chunks[-1], model.chunks[-1], second.sample
        with fail_together():
            if sample in targets.rows and own.real_vocab_size <= theirs.real_vocab_size:
                temperature, group = self._config.rollout.temperature, model.grid.groups.tp
                softmax = Softmax(temperature, own.real_vocab_size, group, own.head_chunk_tokens)
                ids = torch.from_numpy(read.response_ids[sample]).long()
                second.compare(read, sample, targets.logprobs(sample, ids, number, softmax))

    def _keep(self, targets: Targets, model: TrainingEngine, micro: MicroBatch) -> None:
        """Store a teacher's results for the tokens of a micro-batch."""
        k, policy = self._config.teacher.top_k, self._engines.policy
        hidden = micro.output("hidden")
        rows: tuple[torch.Tensor, ...] = (hidden,)
        if k:
            last = model.chunks[-1]
            vocab_size = policy.chunks[-1].real_vocab_size  # a teacher may have more rows than tokens
            chunk = max(1, last.head_chunk_tokens // 4)
            softmax = Softmax(model.spec.temperature, vocab_size, policy.grid.groups.tp, chunk)
            rows = top_k(hidden, last.head_weight, softmax, k)
        parts = zip(*(row.cpu().split(micro.lengths.tolist()) for row in rows))
        targets.rows.update(zip(micro.samples, parts))

    def responses(self, prompts: list[Prompt]) -> Batch:
        """Sample rollout.samples_per_prompt responses per prompt from the teacher.

        The batch has no `rollout_logprobs` and `weight_versions`, because the policy did not sample it.
        """
        engine, sampling = self._engines.generating["teacher"], train_sampling(self._config)
        ids = [prompt.token_ids for prompt in prompts]
        seeds = [
            seed_of(self._config.run.seed, f"teacher.{self._step.number}", place)
            for place in range(len(prompts))
        ]
        self._memory.to_training()  # the policy's engine sleeps
        with self._step.phase("score", timing="teacher_gen"):
            engine.wake_weights()
            engine.wake_cache()
            samples = engine.generate(ids, sampling, seeds)
            engine.sleep()
            assert samples is not None
            samples = exchange(samples, self._step.device)
        batch = batch_of(samples, ids, prompts=prompts, samples_per_prompt=sampling.samples_per_prompt)
        return replace(batch, rollout_logprobs=None, weight_versions=None)

    def _lessons(
        self, batch: Batch
    ) -> Iterator[tuple[int, TrainingEngine, Batch, MicroBatchPlan, AbstractContextManager[None]]]:
        """Yield for each teacher with samples in the batch: number, model, batch to read, plan, and context.

        Inside the context the model has the teacher's weights. For example, with teacher.self_taught=initial
        the policy gets its reference weights.
        """
        goal, engines = self._config.teacher, self._engines
        if goal.self_taught != "none":
            read, policy = self._with_contexts(batch), engines.policy
            is_initial = goal.self_taught == "initial"
            context = policy.reference_weights() if is_initial else nullcontext()
            plan = self._planner.plan_in_place(batch, read, range(len(batch)))
            yield 0, policy, read, plan, context
            return
        sources = [batch.prompts[group].data_source for group in batch.groups.tolist()]
        paths = [goal.sources.get(source, goal.path) for source in sources]
        number = 0
        for path, model in engines.teachers.items():
            own = [i for i in range(len(batch)) if paths[i] == path]
            if own:
                read = self._readers[path].read(batch, own) if path in self._readers else batch
                plan = self._planner.plan_in_place(batch, read, own)
                yield number, model, read, plan, self._memory.lent(model)
                number += 1

    def _with_contexts(self, batch: Batch) -> Batch:
        """Return a batch with the same responses after the prompts of the self-taught policy's template."""
        goal = self._config.teacher
        assert batch.feedback is not None or not needs_feedback(self._config), "the batch was not scored"
        feedback = batch.feedback or [None] * len(batch)
        known: dict[tuple[int, str | None, bytes], np.ndarray] = {}
        prompts = []
        for group, text, opening in zip(batch.groups.tolist(), feedback, batch.prompt_ids):
            context = None if batch.turns is None else opening
            key = group, text, b"" if context is None else context.tobytes()
            if key not in known:
                known[key] = in_context(
                    batch.prompts[group],
                    self._tokenizer,
                    goal.template,
                    feedback=text,
                    limit=goal.max_prompt_tokens,
                    opening=context,
                )
            prompts.append(known[key])
        for sample in some(range(len(batch)), NUM_COMPARED, batch.fingerprint) if batch.turns is None else ():
            check_context(
                prompts[sample],
                batch.prompts[int(batch.groups[sample])],
                self._tokenizer,
                goal.template,
                feedback=feedback[sample],
                limit=goal.max_prompt_tokens,
                sample=sample,
            )
        return Batch(
            prompts, batch.response_ids, groups=batch.groups, truncated=batch.truncated, mask=batch.mask
        )
