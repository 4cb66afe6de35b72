"""Template variables in the config, for example enable_thinking, act like transformers' arguments."""

import copy

import pytest

from rl.data.chat_template import QUESTION, ChatTemplate, set_variables
from rl.data.messages import MessageReader
from tests.chat_templates import tokenizer_of

OWN = """
  {% if level is defined %}{{ level | tojson }}{% endif %}
{% macro m(x) %}{{ x }}{{ level }}{% endmacro %}
{% for message in messages %}{{ m(message.content) }}{% endfor %}
"""
CASES = {
    "qwen3": (None, {"enable_thinking": False}),
    "glm4.5": (None, {"enable_thinking": False}),
    "qwen2.5": (OWN, {"level": ["it's", 1e-6, None, {"a": 'b"\n'}]}),
}


@pytest.mark.parametrize("family", CASES)
def test_variables_of_the_config_reach_the_template(family):
    template, variables = CASES[family]
    plain = copy.deepcopy(tokenizer_of(family))
    plain.chat_template = template or plain.chat_template
    changed = copy.deepcopy(plain)
    set_variables(changed, variables)
    for appends in (False, True):
        options = dict(tokenize=False, add_generation_prompt=appends)
        expected = plain.apply_chat_template([QUESTION], **options, **variables)
        assert changed.apply_chat_template([QUESTION], **options) == expected
    assert plain.apply_chat_template([QUESTION], **options) != expected
    with pytest.raises(ValueError, match="data.template_kwargs has enable_thought=False, but the chat temp"):
        set_variables(changed, {"enable_thought": False})


CLOCKS = {"%H:%M": "the time of day", "%S": "the time of day", "%d %b %Y": "today's date", "always": ""}


@pytest.mark.parametrize("form", CLOCKS)
def test_prompts_do_not_depend_on_the_time_of_their_rendering(form, caplog):
    """A run that continues would have other prompts than before."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    now = "{% set now = now or strftime_now('" + form + "') %}{{ now }}"
    tokenizer.chat_template = now + tokenizer.chat_template
    template = ChatTemplate(tokenizer)
    assert template.clock == CLOCKS[form]
    if template.clock == "the time of day":
        with pytest.raises(ValueError, match="writes the time of day into each prompt.*template_kwargs="):
            MessageReader(template)
    else:
        MessageReader(template)
        assert ("writes today's date into each prompt" in caplog.text) == bool(template.clock)
    set_variables(tokenizer, {"now": "12:00"})
    assert ChatTemplate(tokenizer).clock == ""
