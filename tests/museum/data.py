"""Exhibits: prompts on their way from the data to a group of samples, also over a resume."""

from dataclasses import replace

from tests.museum.museum import Bug, caught_by, exhibit, replaces
from tests.toy import SFT

DRAWN = "draw"
SAMPLES = "samples"
START = "state at the first update"


@exhibit("NVIDIA-NeMo/RL#3599", resumes=True)
@caught_by(START, r"ChangedSinceStart: sampler of .*'position': 12. after it was restored")
@replaces("rl.data.prompt_order.EpochOrder.load_state_dict")
def prompts_skipped_after_a_resume(bug: Bug, load, self, state):
    """675 of 736 prompts, a third of the data reached, were never trained on."""
    load(self, {**state, "position": state["position"] + 4})


@exhibit("NVIDIA-NeMo/RL#3599")
@caught_by(DRAWN, r"CheckFailed: draw check: .* behind 12 prompts, .* drawn 8: prompts are skipped")
@replaces("rl.data.prompt_order.EpochOrder.draw")
def prompts_skipped_in_a_step(bug: Bug, draw, self, n):
    """The same, in a run that was not resumed."""
    found = draw(self, n)
    draw(self, n)
    return found


@exhibit("PrimeIntellect-ai/prime-rl#3332", resumes=True)
@caught_by(START, r"ChangedSinceStart: sampler of .*'position': 0. after it was restored")
@replaces("rl.data.prompt_order.EpochOrder.load_state_dict")
def prompts_repeated_after_a_resume(bug: Bug, load, self, state):
    """Every resumed run started the data from the beginning."""


@exhibit("QwenLM/Qwen3-VL#1947", ranks=2)
@caught_by(DRAWN, r"rank 1 .*CheckFailed: draw check: rows .* come next: rows are repeated, left out, or in")
@replaces("rl.data.prompt_order.EpochOrder.draw")
def order_of_the_data_differs_between_ranks(bug: Bug, draw, self, n):
    """Each rank shuffled with a seed of its own, so prompts were doubled and missing."""
    return draw(self, n)[::-1].copy() if bug.rank == 1 else draw(self, n)


@exhibit("areal-project/AReaL#1419", ranks=2)
@caught_by(SAMPLES, r"SamplesDiffer: sample check: prompt \d of the call has 3 samples instead of 4")
@replaces("rl.rollout.queue_schedule.QueueSchedule.ended")
def sample_lost(bug: Bug, ended, self, start, rows):
    """A failed episode left a group smaller, and the next groups were cut at wrong places."""
    if (start.group, start.number) != (1, 2):
        ended(self, start, rows)


@exhibit("huggingface/trl#3675", ranks=2)
@caught_by(SAMPLES, r"SamplesDiffer: sample check: rank \d generated sample \d of prompt 0")
@replaces("rl.rollout.engine.static_queue")
def sample_generated_twice(bug: Bug, queue, num_items, *, replica, num_replicas):
    """The same prompts were sampled several times within a step."""
    return queue(num_items, replica=0, num_replicas=num_replicas)


@exhibit("huggingface/trl#6673", ranks=2)
@caught_by(SAMPLES, r"SamplesDiffer: sample check: .* has another prompt in the batch than rank \d generated")
@replaces("rl.rollout.queue_schedule.QueueSchedule.ended")
def completion_of_another_prompt(bug: Bug, ended, self, start, rows):
    """The tool loop paired a rollout with a completion generated from another one's context."""
    ended(self, start, [replace(row, prompt=row.prompt ^ 2) for row in rows])


@exhibit("PrimeIntellect-ai/prime-rl#600")
@caught_by("groups", r"CheckFailed: group check: sample \d+ \(prompt \d+\) is in group \d")
@replaces("rl.phases.dialogues.batch_of")
def groups_of_interleaved_prompts(bug: Bug, batch_of, samples, contexts, **options):
    """[a, b, a, b] was cut into groups as [a, a, b, b], so rewards of two tasks were compared."""
    import torch

    batch = batch_of(samples, contexts, **options)
    batch.groups = torch.arange(len(batch)) % len(contexts)
    return batch


@exhibit("rllm-org/rllm#272")
@caught_by("log-probs of engine and trainer", r"LogprobMismatch|CheckFailed")
@replaces("rl.phases.dialogues.batch_of")
def retokenised_responses(bug: Bug, batch_of, *args, **options):
    """Turns were decoded and encoded again, and the KL divergence had spikes."""
    batch = batch_of(*args, **options)
    # The digit tokens of the toy; a real tokenizer splits the same text into other tokens.
    batch.response_ids = [
        ids if len(ids) < 3 else ids[[1, 0, *range(2, len(ids))]] for ids in batch.response_ids
    ]
    return batch


@exhibit("NVIDIA-NeMo/RL#855", at=0)
@caught_by("data", r"begins with two BOS tokens")
@replaces("rl.data.prompts.encode")
def two_BOS_tokens(bug: Bug, encode, texts, tokenizer, *, add_special_tokens=False):
    """The chat template wrote a BOS token and the tokenizer added another."""
    import numpy as np

    bos = np.array([tokenizer.eos_token_id], np.int32)
    tokenizer.bos_token = tokenizer.eos_token
    encoded, offsets = encode(texts, tokenizer, add_special_tokens=False)
    return [np.concatenate([bos, bos, ids]) for ids in encoded], offsets


@exhibit(
    "OpenRLHF/OpenRLHF#1089",
    overrides=("data.val=[TOY/test.parquet]", "validation.every=9", "validation.max_prompts=4"),
    warns=True,
    at=0,
)
@caught_by("data", r"warning: data check: 4 of 4 prompts of data\.val are in data\.train too")
@replaces("rl.engines.inputs.Inputs._prompts")
def validation_prompts_in_the_training_data(bug: Bug, prompts, self, files, **options):
    """Without an evaluation set, its rows were taken from the training set and trained on."""
    return prompts(self, [*files, *self.config.data.val], **options)


@exhibit(
    "verl-project/verl#3287",
    overrides=(*SFT, "data.messages_key=messages", "data.train=[TOY/chats.parquet]"),
    at=0,
)
@caught_by(
    "responses of the data", r"row check: .* the loss of turn 2 of the conversation covers '3<eos><user>'"
)
@replaces("rl.data.chats.tokenize_chats")
def loss_of_the_next_header(bug: Bug, tokenize, *args):
    """The mask of the loss was moved by one token."""
    import numpy as np

    return [
        (ids, np.maximum(mask, np.append(0, mask[:-1])).astype(mask.dtype)) for ids, mask in tokenize(*args)
    ]


@exhibit("verl-project/verl#6975", overrides=("rollout.carry_over=true", "rollout.on_stale=drop"))
@caught_by("carried groups", r"CheckFailed: carry-over check: group \d+ was dropped, but its oldest token")
def groups_dropped_a_version_early(bug: Bug) -> None:
    """Samples that could be used were discarded, because their age was counted from another step."""
    from rl.rollout.sampled_group import SampledGroup

    oldest = SampledGroup.oldest.fget

    def older(self: SampledGroup) -> float:
        if bug.is_on:
            bug.acts()
        return oldest(self) - bug.is_on

    SampledGroup.oldest = property(older)


@exhibit("meta-pytorch/data#1520")
@caught_by(
    DRAWN, r"CheckFailed: draw check: a checkpoint .* after 8 prompts, but complete steps have drawn 4"
)
def cursor_of_an_aborted_step_is_saved(bug: Bug) -> None:
    """Batches that were drawn ahead were lost in a resume."""
    from pathlib import Path

    from rl.run.loop import TrainingLoop
    from rl.stopping.requests import StepAborted

    @bug.replaces(TrainingLoop, "_collect")
    def abort(collect, self):
        self._phases.draw.next(4)
        Path(self._config.run.dir, "stop").touch()
        raise StepAborted

    @bug.replaces(TrainingLoop, "_save")
    def late(save, self, number, metrics):
        self._cursor = self._phases.cursor()
        save(self, number, metrics)
