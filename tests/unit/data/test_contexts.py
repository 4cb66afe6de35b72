"""Prompts of a self-taught policy."""

from dataclasses import replace

import numpy as np
import pytest

from rl.data.contexts import in_context
from rl.data.prompts import Prompt
from tools.make_toy import build_tokenizer

TEMPLATE = "{prompt} Answer: {ground_truth}. {feedback}"
PROMPT = Prompt(0, np.zeros(1, np.int32), "1+1=", "sums", 2, {})


def text_of(prompt, feedback=None, limit=1000):
    tokenizer = build_tokenizer()
    return tokenizer.decode(in_context(prompt, tokenizer, TEMPLATE, feedback=feedback, limit=limit))


def test_a_string_is_put_into_the_template():
    assert text_of(PROMPT, "Too long.") == "1+1= Answer: 2. Too long."
    assert text_of(PROMPT) == "1+1= Answer: 2. "
    assert text_of(PROMPT, "Too long.", limit=5) == "long."


def test_the_prompt_of_a_conversation_is_put_into_the_template():
    tokenizer = build_tokenizer()
    options = dict(feedback="no", limit=1000)
    opening = tokenizer("<user>Add. 1+1=<assistant>2<user>1+1=?<assistant>", return_tensors="np")[
        "input_ids"
    ][0]
    found = in_context(PROMPT, tokenizer, TEMPLATE, opening=opening, **options)
    expected = "<user>Add. 1+1= Answer: 2. no<assistant>2<user>1+1=?<assistant>"
    assert tokenizer.decode(found) == expected
    with pytest.raises(ValueError, match="that of prompt 0 does not contain it"):
        in_context(PROMPT, tokenizer, TEMPLATE, opening=opening[:5], **options)


def test_the_last_message_of_a_chat_is_put_into_the_template():
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    chat = replace(PROMPT, messages=messages)
    tokenizer = build_tokenizer()
    wanted = [messages[0], {"role": "user", "content": "1+1= Answer: 2. no"}]
    rendered = tokenizer.apply_chat_template(wanted, tokenize=False, add_generation_prompt=True)
    assert text_of(chat, "no") == rendered
