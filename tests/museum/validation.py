"""Exhibits: prompts as the template gives them, and validation."""

from dataclasses import replace

from tests.museum.museum import Bug, caught_by, exhibit, replaces
from tests.museum.rewards import FUNCTION
from tests.toy import SFT

PROMPTS, VALIDATION = "tokens of prompts", "results of a validation"
VALIDATES = (
    "data.val=[TOY/test.parquet]",
    "validation.every=1",
    "validation.max_prompts=8",
    "validation.greedy=false",
    "validation.samples_per_prompt=4",
    "validation.before_training=false",
)


@exhibit("marin-community/marin#7179", at=0)
@caught_by(PROMPTS, r"prompt check: prompt 0 of data.train lacks its first token")
@replaces("rl.data.prompts.encode")
def prompts_without_their_first_token(bug: Bug, encode, *args, **options):
    """The prompts were encoded without the special token with which the template begins."""
    encoded, offsets = encode(*args, **options)
    return [ids[1:] for ids in encoded], offsets


@exhibit("huggingface/open-r1#473", overrides=VALIDATES, at=0)
@caught_by(PROMPTS, r"prompt check: prompt \d+ of data.val lacks its end")
@replaces("rl.engines.inputs.Inputs._prompts")
def validation_without_the_generation_prompt(bug: Bug, prompts, self, files, **options):
    """Training and validation rendered with different templates, and only validation saw repetitions."""
    found = prompts(self, files, **options)
    return (
        found if files == self.config.data.train else [replace(p, token_ids=p.token_ids[:-1]) for p in found]
    )


@exhibit("huggingface/open-r1#473", overrides=VALIDATES, at=0, warns=True)
@caught_by("data", r"warning: data check: the chat template renders .*data.train, but those of data.val")
@replaces("rl.engines.inputs.Inputs._prompts")
def validation_without_the_template(bug: Bug, prompts, self, files, **options):
    """The same, with strings that no template renders."""
    found = prompts(self, files, **options)
    return found if files == self.config.data.train else [replace(p, messages=None) for p in found]


@exhibit("PrimeIntellect-ai/prime-rl#600", overrides=VALIDATES, ranks=2)
@caught_by(
    VALIDATION, r"CheckFailed: sample check: sample \d+ .* no longer has the score that was made for it"
)
@replaces("rl.phases.scoring.Scoring.fill_scores")
def validation_repeats_in_another_order(bug: Bug, fill_scores, self, batch, *, timing, predictions=False):
    """[a, b, a, b] was read as [a, a, b, b]; here scores of a validation, by which pass@k is computed."""
    import torch

    answers = fill_scores(self, batch, timing=timing, predictions=predictions)
    if timing == "testing":
        order = torch.arange(len(batch)).view(len(batch.prompts), -1).t().flatten()
        batch.scores, batch.rewards = batch.scores[order], batch.rewards[order]
        batch.score_details = {name: values[order] for name, values in batch.score_details.items()}
    return answers


@exhibit("PrimeIntellect-ai/prime-rl#600", overrides=VALIDATES)
@caught_by(VALIDATION, r"CheckFailed: order check: the samples of a validation .* from sample 1 on")
@replaces("rl.phases.generation.Generation.sample")
def validation_samples_in_another_order(bug: Bug, sample, self, call):
    """The same, of the samples themselves."""
    import torch

    batch = sample(self, call)
    if not call.purpose.startswith("validation"):
        return batch
    return batch.select(torch.arange(len(batch)).view(len(call.prompts), -1).t().flatten().tolist())


@exhibit("PrimeIntellect-ai/prime-rl#3385", overrides=VALIDATES)
@caught_by("version of a validation", r"StaleTokens: \d+ of \d+ tokens have a staleness outside of 0 to 0")
@replaces("rl.engines.memory.MemorySharing.to_generation")
def validation_with_the_weights_before(bug: Bug, to_generation, self, step, refit_phase):
    """The evaluation of a step did not wait for its weights and measured the policy of an earlier one."""
    engine = self.engines.rollout
    if engine.weights_version == self.engines.policy.version - 1 == step - 1:  # not yet refitted in this step
        engine.wake_weights()
        engine.wake_cache()
        return {}
    return to_generation(self, step, refit_phase)


@exhibit("ByteDance-Seed/VeOmni#1077", overrides=VALIDATES, at=0)
@caught_by(VALIDATION, r"CheckFailed: validation check: 4 prompts of data.val are measured, instead of")
@replaces("rl.engines.inputs.Inputs._prompts")
def limit_of_the_training_data_for_the_validation(bug: Bug, prompts, self, files, **options):
    """The limit of the training data was applied to the validation."""
    changed = {} if files == self.config.data.train else {"max_prompts": 4}
    return prompts(self, files, **options | changed)


@exhibit("scitix/sieval#88", overrides=(*VALIDATES, f"{FUNCTION}:voted"))
@caught_by(VALIDATION, r"CheckFailed: validation check: acc/maj@\d.* is .*, but samples of its prompts give")
def tied_votes_for_the_first_answer(bug: Bug) -> None:
    """A tie was won by the answer that came first, so the metric changed with the order of the samples."""
    from rl.run import validation_metrics

    @bug.replaces(validation_metrics, "_majority")
    def first(majority, values, answers, subsets):
        places = [answers.index(answer) for answer in answers]
        return majority(values, answers, subsets * [1 - 1e-9 * place for place in places])


@exhibit(
    "pytorch/torchtitan#4167",
    overrides=(*SFT, "data.val=[TOY/test.parquet]", "validation.every=1", "validation.max_prompts=8"),
)
@caught_by(VALIDATION, r"CheckFailed: validation check: val-core/.*/loss is .*, but its trained tokens give")
@replaces("rl.run.validation.segment_sum")
def mean_of_means_in_a_validation_loss(bug: Bug, segment_sum, column, lengths):
    """The mean of means gave responses with few tokens too much weight."""
    return segment_sum(column, lengths) / lengths


@exhibit(
    "verl-project/verl#78",
    overrides=(*SFT, "data.val=[TOY/test.parquet]", "validation.every=1", "validation.max_prompts=6"),
)
@caught_by(
    VALIDATION, r"CheckFailed: validation check: the responses in the loss of .* are 4, but data.val has 6"
)
def validation_loss_without_the_last_batch(bug: Bug) -> None:
    """The last, incomplete batch of a validation was left out."""
    from rl.run import validation

    def whole_parts(start, stop, step):
        if bug.is_on:
            bug.acts()
            stop -= step - 1
        return range(start, stop, step)

    validation.range = whole_parts
