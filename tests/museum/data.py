"""Exhibits: prompts on their way from the data to a group of samples, also over a resume."""

from dataclasses import replace

from tests.museum.museum import Bug, exhibit

DRAWN = "draw"
SAMPLES = "samples"


@exhibit(
    name="prompts skipped after a resume",
    peer="NVIDIA-NeMo/RL#3599",
    saw="675 of 736 prompts, a third of the data reached, were never trained on.",
    caught_by=DRAWN,
    expects=r"CheckFailed: draw check: .* behind 12 prompts, .* drawn 8: prompts are skipped",
    resumes=True,
    at=0,
)
def skipped(bug: Bug) -> None:
    from rl.data.sampler import EpochSampler

    @bug.replaces(EpochSampler, "load_state_dict")
    def ahead(load, self, state):
        load(self, {**state, "position": state["position"] + 4})


@exhibit(
    name="prompts repeated after a resume",
    peer="PrimeIntellect-ai/prime-rl#3332",
    saw="Every resumed run started the data from the beginning.",
    caught_by=DRAWN,
    expects=r"CheckFailed: draw check: .* behind 0 prompts, .* drawn 8: prompts are repeated",
    resumes=True,
    at=0,
)
def repeated(bug: Bug) -> None:
    from rl.data.sampler import EpochSampler

    @bug.replaces(EpochSampler, "load_state_dict")
    def ignored(load, self, state):
        pass


@exhibit(
    name="order of the data differs between ranks",
    peer="QwenLM/Qwen3-VL#1947",
    saw="Each rank shuffled with a seed of its own, so prompts were doubled and missing.",
    caught_by="agreement before each phase",
    expects=r"Disagreement: ranks disagree on the batch ids before generate.* rank \d",
    ranks=2,
)
def other_order(bug: Bug) -> None:
    from rl.data.sampler import EpochSampler

    @bug.replaces(EpochSampler, "draw")
    def shuffled(draw, self, n):
        return draw(self, n)[::-1].copy() if bug.rank == 1 else draw(self, n)


@exhibit(
    name="sample lost",
    peer="areal-project/AReaL#1419",
    saw="A failed episode left a group smaller, and the next groups were cut at wrong places.",
    caught_by=SAMPLES,
    expects=r"SamplesDiffer: sample check: prompt \d of the call has 3 samples instead of 4",
    ranks=2,
)
def lost(bug: Bug) -> None:
    from rl.rollout.schedule import QueueSchedule

    @bug.replaces(QueueSchedule, "ended")
    def some(ended, self, start, rows):
        if (start.group, start.number) != (1, 2):
            ended(self, start, rows)


@exhibit(
    name="sample generated twice",
    peer="huggingface/trl#3675",
    saw="The same prompts were sampled several times within a step.",
    caught_by=SAMPLES,
    expects=r"SamplesDiffer: sample check: rank \d generated sample \d of prompt 0",
    ranks=2,
)
def twice(bug: Bug) -> None:
    from rl.rollout import engine

    @bug.replaces(engine, "StaticQueue")
    def of_first_replica(queue, num_items, *, replica, num_replicas):
        return queue(num_items, replica=0, num_replicas=num_replicas)


@exhibit(
    name="completion of another prompt",
    peer="huggingface/trl#6673",
    saw="The tool loop paired a rollout with a completion generated from another one's context.",
    caught_by=SAMPLES,
    expects=r"SamplesDiffer: sample check: .* has another prompt in the batch than rank \d generated",
    ranks=2,
)
def exchanged(bug: Bug) -> None:
    from rl.rollout.schedule import QueueSchedule

    @bug.replaces(QueueSchedule, "ended")
    def other(ended, self, start, rows):
        ended(self, start, [replace(row, prompt=row.prompt ^ 2) for row in rows])


@exhibit(
    name="groups of interleaved prompts",
    peer="PrimeIntellect-ai/prime-rl#600",
    saw="[a, b, a, b] was cut into groups as [a, a, b, b], so rewards of two tasks were compared.",
    caught_by="groups",
    expects=r"CheckFailed: group check: sample \d+ \(prompt \d+\) is in group \d",
)
def interleaved(bug: Bug) -> None:
    from rl.phases import generation

    @bug.replaces(generation, "batch_of")
    def tiled(batch_of, samples, contexts, **options):
        import torch

        batch = batch_of(samples, contexts, **options)
        batch.groups = torch.arange(len(batch)) % len(contexts)
        return batch


@exhibit(
    name="retokenised responses",
    peer="rllm-org/rllm#272",
    saw="Turns were decoded and encoded again, and the KL divergence had spikes.",
    caught_by="log-probs of engine and trainer",
    expects=r"LogprobMismatch|CheckFailed",
)
def retokenised(bug: Bug) -> None:
    from rl.phases import generation

    @bug.replaces(generation, "batch_of")
    def encoded(batch_of, *args, **options):
        batch = batch_of(*args, **options)
        # The digit tokens of the toy; a real tokenizer splits the same text into other tokens.
        batch.response_ids = [
            ids if len(ids) < 3 else ids[[1, 0, *range(2, len(ids))]] for ids in batch.response_ids
        ]
        return batch


@exhibit(
    name="two BOS tokens",
    peer="NVIDIA-NeMo/RL#855",
    saw="The chat template wrote a BOS token and the tokenizer added another.",
    caught_by="data",
    expects=r"begins with two BOS tokens",
    at=0,
)
def two_bos(bug: Bug) -> None:
    from rl.data import prompts

    @bug.replaces(prompts, "_encode")
    def doubled(encode, texts, tokenizer, *, add_special_tokens):
        import numpy as np

        bos = np.array([tokenizer.eos_token_id], np.int32)
        tokenizer.bos_token = tokenizer.eos_token
        return [np.concatenate([bos, bos, ids]) for ids in encode(texts, tokenizer, add_special_tokens=False)]


@exhibit(
    name="validation prompts in the training data",
    peer="OpenRLHF/OpenRLHF#1089",
    saw="Without an evaluation set, its rows were taken from the training set and trained on.",
    caught_by="data",
    expects=r"warning: data check: 4 of 4 prompts of data\.val are in data\.train too",
    overrides=("data.val=[TOY/test.parquet]", "validation.every=9", "validation.max_prompts=4"),
    warns=True,
    at=0,
)
def leaked(bug: Bug) -> None:
    from rl.engines.inputs import Inputs

    @bug.replaces(Inputs, "_prompts")
    def all_rows(prompts, self, files, **options):
        return prompts(self, [*files, *self.config.data.val], **options)
