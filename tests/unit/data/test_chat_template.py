"""Variables of a chat template that the config sets, against transformers' arguments of the template."""

import copy

import pytest

from rl.data.chat_template import QUESTION, set_variables
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
    set_variables(changed, variables, key="data.template_kwargs")
    for appends in (False, True):
        options = dict(tokenize=False, add_generation_prompt=appends)
        expected = plain.apply_chat_template([QUESTION], **options, **variables)
        assert changed.apply_chat_template([QUESTION], **options) == expected
    assert plain.apply_chat_template([QUESTION], **options) != expected
    with pytest.raises(ValueError, match="data.template_kwargs has enable_thought=False, but the chat temp"):
        set_variables(changed, {"enable_thought": False}, key="data.template_kwargs")
