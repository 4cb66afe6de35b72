"""Exhibits: how the engine samples and where a response ends."""

from dataclasses import replace

from tests.museum.museum import Bug, exhibit

ENDING = "ending"
LONG = ("rollout.max_response_tokens=24", "data.prompts_per_step=16", "training.micro_batch_tokens=800")
"""Long enough for some samples to end with a stop token."""
GAP = "log-probs of engine and trainer"


@exhibit(
    name="truncated responses count as complete",
    peer="OpenRLHF/OpenRLHF#1327",
    saw="finish_reason=length was dropped, so the penalty of truncated rollouts never applied.",
    caught_by=ENDING,
    expects=r"CheckFailed: ending check: .* with 6 tokens is complete by its label, but does not end",
)
def complete(bug: Bug) -> None:
    from rl.rollout.single_turn import SingleTurn

    @bug.replaces(SingleTurn, "receive")
    def stopped(receive, self, name, completion):
        receive(self, name, replace(completion, end="stop"))


@exhibit(
    name="stop token ignored",
    peer="google/tunix#842",
    saw="The policy did not stop at its end of turn and went on to the length limit.",
    caught_by=ENDING,
    expects=r"CheckFailed: ending check: .* continues after a stop token",
    overrides=LONG,
)
def ignored(bug: Bug) -> None:
    from rl.rollout import calls

    @bug.replaces(calls, "call_of")
    def endless(call_of, *args):
        found = call_of(*args)
        found.params.ignore_eos = True
        return found


@exhibit(
    name="end token cut off",
    peer="rasbt/reasoning-from-scratch#185",
    saw="The end token was not part of the response, so nothing taught the policy to stop.",
    caught_by=ENDING,
    expects=r"CheckFailed: ending check: .* is complete by its label, but does not end with a stop token",
    overrides=LONG,
)
def cut_off(bug: Bug) -> None:
    from rl.rollout.single_turn import SingleTurn

    @bug.replaces(SingleTurn, "receive")
    def shorter(receive, self, name, completion):
        if completion.end == "stop":
            parts = {
                part: getattr(completion, part)[:-1] for part in ("token_ids", "logprobs", "weight_versions")
            }
            completion = replace(completion, **parts)
        receive(self, name, completion)


@exhibit(
    name="engine truncates earlier than configured",
    peer="huggingface/trl#5697",
    saw="A default of 256 tokens truncated 98 % of the completions, and all rewards were 0.",
    caught_by=ENDING,
    expects=r"CheckFailed: ending check: .* with 4 tokens is truncated by its label, but not at rollout",
)
def earlier(bug: Bug) -> None:
    from rl.rollout import calls

    @bug.replaces(calls, "call_of")
    def shorter(call_of, *args):
        found = call_of(*args)
        found.params.max_tokens = 4
        return found


@exhibit(
    name="samples of a group share a seed",
    peer="vllm-project/vllm#11898",
    saw="With n > 1 and a seed every completion of a prompt was the same.",
    caught_by="duplicates",
    expects=r"CheckFailed: duplicates check: \d+ of 16 samples equal an earlier sample of their prompt",
)
def same_seed(bug: Bug) -> None:
    from rl.rollout import single_turn

    @bug.replaces(single_turn, "seed_of")
    def of_prompt(seed_of, seed, number):
        return seed_of(seed, 0)


@exhibit(
    name="greedy rollouts",
    peer="huggingface/trl#5783",
    saw="Defaults of the model replaced temperature 1, and half of a group were equal.",
    caught_by="duplicates",
    expects=r"CheckFailed: duplicates check: .*or the engine samples greedily|LogprobMismatch",
)
def greedy(bug: Bug) -> None:
    from rl.rollout import calls

    @bug.replaces(calls, "call_of")
    def cold(call_of, request, sampling, version):
        return call_of(request, replace(sampling, temperature=0.0), version)


@exhibit(
    name="log-probs before the temperature",
    peer="PrimeIntellect-ai/prime-rl#697",
    saw="The engine reported log-probs of another temperature than it sampled with; ratios exploded.",
    caught_by=GAP,
    expects=r"LogprobMismatch|CheckFailed: likelihood check",
    overrides=("rollout.temperature=0.6",),
)
def raw(bug: Bug) -> None:
    from rl.rollout.calls import Calls

    @bug.replaces(Calls, "_completion")
    def untempered(completion, self, *args):
        found = completion(self, *args)
        return replace(found, logprobs=found.logprobs * 0.6)


@exhibit(
    name="log-probs in another base",
    peer="vllm-project/vllm#9453",
    saw="Log-probs of the engine were not those that the client assumed.",
    caught_by="likelihoods",
    expects=r"CheckFailed: likelihood check: old policy / rollout",
    overrides=("agreement.logprob_slack=0", "data.prompts_per_step=16", "training.micro_batch_tokens=400"),
)
def other_base(bug: Bug) -> None:
    from rl.rollout.calls import Calls

    @bug.replaces(Calls, "_completion")
    def binary(completion, self, *args):
        import math

        found = completion(self, *args)
        return replace(found, logprobs=found.logprobs / math.log(2))


@exhibit(
    name="tokens labelled with a later version",
    peer="areal-project/AReaL#1569",
    saw="The version was read again after the answer, so old tokens counted as new.",
    caught_by="staleness",
    expects=r"StaleTokens",
)
def later_version(bug: Bug) -> None:
    from rl.rollout.calls import Live

    @bug.replaces(Live, "versions")
    def after(versions, self, num_tokens):
        return versions(self, num_tokens) + 1
