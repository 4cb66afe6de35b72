"""Exhibits: how the engine samples and where a response ends."""

from dataclasses import replace

from tests.museum.museum import Bug, caught_by, exhibit, replaces

ENDING = "ending"
LONG = ("rollout.max_response_tokens=24", "data.prompts_per_step=16", "training.micro_batch_tokens=800")
"""Long enough for some samples to end with a stop token."""
GAP = "log-probs of engine and trainer"


@exhibit("OpenRLHF/OpenRLHF#1327")
@caught_by(ENDING, r"CheckFailed: ending check: .* with 6 tokens is complete by its label, but does not end")
@replaces("rl.rollout.single_turn.SingleTurn.receive")
def truncated_responses_count_as_complete(bug: Bug, receive, self, name, completion):
    """finish_reason=length was dropped, so the penalty of truncated rollouts never applied."""
    receive(self, name, replace(completion, end="stop"))


@exhibit("google/tunix#842", overrides=LONG)
@caught_by("sampling parameters", r"CheckFailed: sampling check: .* with ignore_eos=True")
@replaces("rl.rollout.calls.call_of")
def stop_token_ignored(bug: Bug, call_of, *args):
    """The policy did not stop at its end of turn and went on to the length limit."""
    found = call_of(*args)
    found.params.ignore_eos = True
    return found


@exhibit("rasbt/reasoning-from-scratch#185", overrides=LONG)
@caught_by(
    ENDING, r"CheckFailed: ending check: .* is complete by its label, but does not end with a stop token"
)
@replaces("rl.rollout.single_turn.SingleTurn.receive")
def end_token_cut_off(bug: Bug, receive, self, name, completion):
    """The end token was not part of the response, so nothing taught the policy to stop."""
    if completion.end == "stop":
        parts = {
            part: getattr(completion, part)[:-1] for part in ("token_ids", "logprobs", "weight_versions")
        }
        completion = replace(completion, **parts)
    receive(self, name, completion)


@exhibit("huggingface/trl#5697")
@caught_by(
    ENDING, r"CheckFailed: ending check: .* with 4 tokens is truncated by its label, but not at rollout"
)
@replaces("rl.rollout.calls.call_of")
def engine_truncates_earlier_than_configured(bug: Bug, call_of, *args):
    """A default of 256 tokens truncated 98 % of the completions, and all rewards were 0."""
    found = call_of(*args)
    found.params.max_tokens = 4
    return found


@exhibit("vllm-project/vllm#11898")
@caught_by("seeds", r"CheckFailed: seed check: sample \d+ .* was sampled with a seed that another sample")
@replaces("rl.rollout.single_turn.seed_of")
def samples_of_a_group_share_a_seed(bug: Bug, seed_of, seed, number):
    """With n > 1 and a seed every completion of a prompt was the same."""
    return seed_of(seed, 0)


@exhibit("huggingface/trl#5783")
@caught_by("sampling parameters", r"CheckFailed: sampling check: .* with the parameters of greedy")
@replaces("rl.rollout.calls.call_of")
def greedy_rollouts(bug: Bug, call_of, request, sampling, version):
    """Defaults of the model replaced temperature 1, and half of a group were equal."""
    return call_of(request, replace(sampling, temperature=0.0), version)


@exhibit("PrimeIntellect-ai/prime-rl#697", overrides=("rollout.temperature=0.6",))
@caught_by(GAP, r"LogprobMismatch: .* With the trainer's log-probs divided by 1\.667")
@replaces("rl.rollout.calls.Calls._completion")
def log_probs_before_the_temperature(bug: Bug, completion, self, *args):
    """The engine reported log-probs of another temperature than it sampled with; ratios exploded."""
    found = completion(self, *args)
    return replace(found, logprobs=found.logprobs * 0.6)


@exhibit("vllm-project/vllm#9453")
@caught_by(GAP, r"LogprobMismatch: .* With the trainer's log-probs divided by 0\.693")
@replaces("rl.rollout.calls.Calls._completion")
def log_probs_in_another_base(bug: Bug, completion, self, *args):
    """The engine's log-probs were not the log-probs that the client assumed."""
    import math

    found = completion(self, *args)
    return replace(found, logprobs=found.logprobs / math.log(2))


@exhibit("areal-project/AReaL#1569")
@caught_by(
    "staleness", r"SamplesDiffer: sample check: token 0 of a request has the version 2 .* version 1 sampled"
)
@replaces("rl.rollout.calls.Live.versions")
def tokens_labelled_with_a_later_version(bug: Bug, versions, self, num_tokens):
    """The version was read again after the answer, so old tokens counted as new."""
    return versions(self, num_tokens) + 1


SEEDS = "seeds"


@exhibit("verl-project/verl-omni#561", ranks=2, at=1, overrides=("model.dtype=bfloat16",))
@caught_by(SEEDS, r"CheckFailed: seed check: sample \d+ \(prompt \d+\) was sampled with a seed that another")
@replaces("rl.rollout.queue_schedule.QueueSchedule._samples_of")
def seeds_by_the_place_within_a_replica(bug: Bug, samples_of, self, item):
    """Each worker derived the seeds of its prompts from their place in its own part of the batch."""
    return [replace(start, seed=self._seeds[item // 2]) for start in samples_of(self, item)]


@exhibit("verl-project/verl-omni#60")
@caught_by(SEEDS, r"CheckFailed: seed check: .*and 15 further samples of 16")
@replaces("rl.rollout.queue_schedule.QueueSchedule._samples_of")
def seeds_of_the_first_step(bug: Bug, samples_of, self, item):
    """Seeds depended on the prompt's place only, so every step sampled with the same random numbers."""
    kept = bug.__dict__.setdefault("seeds", {})
    return [replace(start, seed=kept.setdefault(item, item)) for start in samples_of(self, item)]


@exhibit("gradientinstitute/aboleth#56")
@caught_by(SEEDS, r"CheckFailed: repetition check: sample \d+ .* is an improbable response, but an earlier")
@replaces("rl.rollout.cpu_sampler.uniforms")
def all_samples_with_one_seed(bug: Bug, uniforms, seeds, positions):
    """With a seed, all samples of one call were equal, although each had its own number."""
    return uniforms(seeds * 0 + 7, positions)
