from dataclasses import replace

import numpy as np
import pytest

from rl.data.prompts import load_prompts
from rl.data.rendering import MAX_COMPARED, check_rendering, note_of_strings, warn_of_unlike_prompts
from tests.unit.data.test_prompts import write_jsonl
from tools.make_toy import build_tokenizer

TEMPLATES = {
    "the toy's": None,
    "a BOS and a generation prompt": (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}={% endfor %}"
        "{% if add_generation_prompt %}+{% endif %}"
    ),
    "none after a tool": (
        "{% for m in messages %}{{ m.content }}={% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}+{% endif %}"
    ),
}


@pytest.fixture(params=TEMPLATES)
def tokenizer(request):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATES[request.param] or tokenizer.chat_template
    tokenizer.bos_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture
def prompts(tokenizer, tmp_path):
    return load(tokenizer, tmp_path)


def load(tokenizer, directory, max_prompt_tokens=16):
    chats = [[{"role": "user", "content": f"{i}+{i}"}] for i in range(600)]
    chats[123].append({"role": "tool", "content": "3"})
    rows = [{"prompt": chat} for chat in chats] + [{"prompt": f"{i}+1="} for i in range(50)]
    file = write_jsonl(directory / "a.jsonl", rows)
    limits = dict(max_prompt_tokens=max_prompt_tokens, overlong="truncate_left")
    return load_prompts([file], tokenizer, prompt_key="prompt", **limits)


def check(prompts, tokenizer, limit=16):
    check_rendering(prompts, tokenizer, key="data.val", max_prompt_tokens=limit)


def test_prompts_as_they_are_read_pass(prompts, tokenizer, tmp_path):
    check(prompts, tokenizer)
    check(load(tokenizer, tmp_path, 4), tokenizer, 4)
    check([], tokenizer)


def test_prompts_that_all_lack_a_token_are_found(prompts, tokenizer):
    lacking = [replace(prompt, token_ids=prompt.token_ids[1:]) for prompt in prompts]
    with pytest.raises(ValueError, match="prompt 0 of data.val lacks its first token"):
        check(lacking, tokenizer)
    with pytest.raises(ValueError, match="prompt 600 of data.val lacks its first token"):
        check(lacking[600:], tokenizer)
    doubled = [
        replace(prompt, token_ids=prompt.token_ids[[0, *range(len(prompt.token_ids))]]) for prompt in prompts
    ]
    with pytest.raises(ValueError, match="begins with .*, which must not be there"):
        check(doubled, tokenizer)
    with pytest.raises(ValueError, match="lacks its end"):
        check([replace(prompt, token_ids=prompt.token_ids[:-1]) for prompt in prompts], tokenizer)


def test_one_prompt_without_the_generation_prompt_is_found(prompts, tokenizer):
    wrong = prompts[77]
    prompts[77] = replace(wrong, text=wrong.text[:-1], token_ids=wrong.token_ids[:-1])
    with pytest.raises(ValueError, match="prompt 77 of data.val lacks its end"):
        check(prompts, tokenizer)


def test_the_prompts_that_are_compared_are_bounded(prompts, tokenizer, monkeypatch):
    compared = []
    monkeypatch.setattr(
        "rl.data.rendering.tokens_again", lambda prompt, _: compared.append(prompt) or prompt.token_ids
    )
    check(
        [
            replace(prompt, text="", token_ids=np.roll(prompt.token_ids, i))
            for i, prompt in enumerate(prompts)
        ],
        tokenizer,
    )
    assert len(compared) <= 2 * MAX_COMPARED


def test_validation_without_the_template_is_warned_of(prompts):
    chats, strings = prompts[:600], prompts[600:]
    assert "those of data.val are strings" in warn_of_unlike_prompts(chats, strings)
    assert "those of data.train are strings" in warn_of_unlike_prompts(strings, chats)
    for pair in ((chats, chats), (strings, strings), (prompts, chats), (chats, []), ([object()], chats)):
        assert warn_of_unlike_prompts(*pair) == ""


def test_strings_are_noted_if_the_model_has_a_template(prompts, tokenizer):
    chats, strings = prompts[:600], prompts[600:]
    assert "are strings, so the model's chat template is not applied" in note_of_strings(strings, tokenizer)
    assert note_of_strings([*chats, object()], tokenizer) == ""
