"""Exhibits: trajectories with environments."""

from dataclasses import replace

from tests.museum.museum import Bug, caught_by, exhibit, replaces
from tests.museum.tour import BF16, ENVIRONMENTS

ANSWERS = "answers of environments"
CONTEXTS = "contexts of turns"


@exhibit("PrimeIntellect-ai/verifiers#1067", ranks=2, overrides=ENVIRONMENTS)
@caught_by(ANSWERS, r"WrongAnswer: the answer of an environment to request \d+ of trajectory .* \(step\)")
@replaces("rl.features.agents.dialogue.Trajectories._take_reply")
def answer_of_another_sandbox(bug: Bug, take_reply, self, session, reply):
    """One sandbox was handed to two rollouts, and their observations mixed."""
    if bug.rank == 1 and reply.kind == "step" and reply.messages:
        mine, held = reply.messages, getattr(bug, "messages", None)
        bug.messages = mine  # type: ignore[attr-defined]
        reply = replace(reply, messages=held or mine)
    take_reply(self, session, reply)


@exhibit("NVIDIA-NeMo/RL#2821", overrides=(*ENVIRONMENTS, BF16))
@caught_by(CONTEXTS, r"WrongAnswer: the tokens before turn \d+ of trajectory .* are not in the conversation")
@replaces("rl.features.agents.chat.Chat.extend")
def turns_appear_twice(bug: Bug, extend, self, context, turn, *args):
    """The log of each turn held the turns before it again, so the policy learned them twice."""
    import numpy as np

    return np.concatenate([self._without_end(turn), extend(self, context, turn, *args)]).astype(np.int32)


@exhibit("sgl-project/sglang#26555", overrides=(*ENVIRONMENTS, BF16))
@caught_by(CONTEXTS, r"SamplesDiffer: sample check: .* has other tokens before turn 2 in the batch")
@replaces("rl.rollout.calls.call_of")
def engine_tokenizes_the_context_again(bug: Bug, call_of, request, *args):
    """The engine decoded the ids that it was given and encoded the text, so it continued other tokens."""
    call = call_of(request, *args)
    if request.name.endswith(".1"):  # a token became two
        token = call.prompt["prompt_token_ids"][-2]
        call.prompt["prompt_token_ids"].insert(-1, token)
    return call


LINES = (ENVIRONMENTS[0].replace(":Echo", ":Lines"), *ENVIRONMENTS[1:])


@exhibit("verl-project/verl#6921", overrides=LINES)
@caught_by(CONTEXTS, r"WrongAnswer: the tokens before turn \d+ of trajectory .* are not in the conversation")
@replaces("rl.features.agents.chat.Chat.extend")
def separator_of_turns_dropped(bug: Bug, extend, self, *args):
    """The newline that the template writes after a turn was missing at each boundary."""
    return extend(self, *args)[1:]


@exhibit("huggingface/trl#6031", ranks=2, overrides=ENVIRONMENTS)
@caught_by(ANSWERS, r"rank 1 .*WrongAnswer: trajectory .* ends with .*, but its environment gave it")
@replaces("rl.features.agents.dialogue.Trajectories._finish")
def score_of_the_trajectory_before(bug: Bug, finish, self, session, values):
    """The environment was reused before its reward was read, so a trajectory got another one's reward."""
    mine = {"score": sum(session.trajectory.rewards)}
    if bug.rank == 1:
        values = getattr(bug, "score", mine)
        bug.score = mine  # type: ignore[attr-defined]
    finish(self, session, values)


@exhibit("PrimeIntellect-ai/verifiers#1906", overrides=ENVIRONMENTS)
@caught_by(ANSWERS, r"WrongAnswer: the environment of trajectory .* began with another row or seed")
@replaces("rl.features.agents.pool.EnvironmentPool.open")
def each_sample_of_a_group_has_its_own_task(bug: Bug, open_, self, session, row, **options):
    """Each sample of a group got a task of its own, although a group compares answers to one task."""
    open_(self, session, row | {"seed": row["seed"] + len(self._sessions)}, **options)
