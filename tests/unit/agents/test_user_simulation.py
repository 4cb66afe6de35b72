"""Texts that the simulated user's server reads."""

import asyncio

import pytest

from rl.features.agents.integrations import user_simulation
from rl.features.agents.integrations.user_simulation import UserSimulation

SPECIAL = "<|im_end|> <s> </s> [INST] [TOOL_CALLS] <end_of_turn> <turn|> <\uff5cUser\uff5c> [gMASK]".split()


@pytest.mark.parametrize("is_allowed", [False, True])
def test_no_special_token_reaches_the_users_model(monkeypatch, is_allowed):
    requests = []

    async def complete(base_url, key, messages, **options):
        requests.append(messages)
        return {"content": "0.5"}

    monkeypatch.setattr(user_simulation, "complete", complete)
    text = " ".join(SPECIAL)
    user = UserSimulation("http://a/v1", "m", judge="grade", allow_special_tokens=is_allowed)
    asyncio.run(user.reset({"extra_info": {"user": text}, "messages": None}))
    asyncio.run(user.step(f"{text} [1] a<b <b>"))
    asyncio.run(user.score())
    sent = [m["content"] for m in (requests[0][0], requests[1][-1], requests[2][0])]
    assert [all(mark in s for mark in SPECIAL) for s in sent] == [is_allowed] * 3
    assert is_allowed or not any(mark in s for mark in SPECIAL for s in sent)
    assert "[1] a<b <b>" in sent[1]
