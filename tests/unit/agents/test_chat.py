"""Tests of the tokens between two turns, over the templates of model families."""

import copy
import functools
import json
import os
import random

import numpy as np
import pytest

from rl.data.chat_template import TOOL
from rl.features.agents.chat import Chat
from rl.features.agents.tool_calls import FAMILIES, parse_calls
from tests.chat_templates import TOKENS, end_ids, tokenizer_of

SYSTEM = {"role": "system", "content": "rules"}
USER = {"role": "user", "content": "question"}
KEEPING = sorted(set(TOKENS) - {"deepseek-v3"})
"""Families with a template that only appends while tools are called."""
CONVERSATIONS = int(os.environ.get("LOCKSTEP_CONVERSATIONS", 300))


@functools.cache
def chat_of(family: str, **options) -> Chat:
    return Chat(tokenizer_of(family), end_token_ids=end_ids(family), **options)


def dumps(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False)


def written(family: str, content: str, calls: list[dict], thinking: str = "") -> str:
    """Return a turn as a model of the family writes it, without its end token."""
    functions = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    if family.startswith("qwen"):
        text = f"<think>\n{thinking}\n</think>\n\n" if thinking else ""
        blocks = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(arguments)}}}\n</tool_call>'
            for _, name, arguments in functions
        ]
        return text + "\n".join([content] * bool(content) + blocks)
    if family == "llama3.1":
        return "".join(f'{{"name": "{n}", "parameters": {dumps(a)}}}' for _, n, a in functions) or content
    if family == "mistral":
        values = [dumps({"name": n, "arguments": a})[:-1] + f', "id": "{id}"}}' for id, n, a in functions]
        return f"[TOOL_CALLS][{', '.join(values)}]" if calls else content
    if family == "glm4.5":
        text = f"\n<think>{thinking}</think>" + (f"\n{content}" if content else "")
        for _, name, arguments in functions:
            pairs = "".join(
                f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items()
            )
            text += f"\n<tool_call>{name}\n{pairs}</tool_call>"
        return text
    token = "<\uff5ctool\u2581{}\uff5c>".format
    blocks = [
        token("call\u2581begin") + n + token("sep") + dumps(a) + token("call\u2581end")
        for _, n, a in functions
    ]
    inside = token("calls\u2581begin") + "".join(blocks) + token("calls\u2581end") if calls else ""
    return content + inside


def call(id: str, **arguments) -> dict:
    return {"id": id, "type": "function", "function": {"name": "lookup", "arguments": arguments}}


def reply(id: str, content: str = "b") -> dict:
    return {"role": "tool", "tool_call_id": id, "name": "lookup", "content": content}


def end_of(family: str, to_tools: bool) -> str:
    """Return the token at which the family's models end a turn."""
    return ("<|observation|>" if to_tools else "<|user|>") if family == "glm4.5" else TOKENS[family][0]


def ids_of(family: str, text: str) -> np.ndarray:
    return np.array(tokenizer_of(family)(text, add_special_tokens=False)["input_ids"], np.int32)


def random_ids(family: str, text: str, chance: random.Random) -> np.ndarray:
    """Return ids that decode to the text, but seldom equal the tokenizer's."""
    special = tokenizer_of(family).get_added_vocab()
    pieces, word = [], ""
    while text:
        token = next((t for t in special if text.startswith(t)), "")
        if token or chance.random() < 0.4:
            pieces.append(word)
            word = ""
        word += token or text[0]
        if token:
            pieces.append(word)
            word = ""
        text = text[len(token) or 1 :]
    return np.concatenate([ids_of(family, piece) for piece in [*pieces, word] if piece])


def random_text(chance: random.Random, *, special: list[str] = ()) -> str:
    words = [
        "key",
        "the answer",
        "42",
        "\u00e9t\u00e9",
        '"quoted"',
        "{",
        "a\n\nb",
        "\ud55c\uad6d",
        "lookup",
        *special,
    ]
    return " ".join(chance.choices(words, k=chance.randint(1, 6)))


def converse(chat: Chat, family: str, chance: random.Random, *, canonical: bool) -> tuple:
    """Hold a random conversation; return its context, its messages and tools, and the sampled spans."""
    with_tools = chance.random() < 0.8
    tools = [TOOL] if with_tools else []
    messages = [{"role": "user", "content": random_text(chance)}]
    if family != "mistral" and chance.random() < 0.5:
        messages.insert(0, {"role": "system", "content": random_text(chance)})
    thinks = with_tools and family in ("qwen3", "glm4.5")
    context, spans, between = chat.open(messages, tools), [], []
    for number in range(chance.randint(1, 5)):
        calls = []
        if with_tools:
            most = 1 if family == "llama3.1" else 3
            calls = [
                call(f"call{number:03d}{i:02d}", key=random_text(chance))
                for i in range(chance.randint(1, most))
            ]
        has_content = not calls or (family in ("qwen2.5", "qwen3", "glm4.5") and chance.random() < 0.5)
        content = random_text(chance) if has_content else ""
        thinking = random_text(chance) if thinks and chance.random() < 0.6 else ""
        text = written(family, content, calls, thinking) + end_of(family, bool(calls))
        turn = ids_of(family, text) if canonical else random_ids(family, text, chance)
        parsed = chat.parse(turn, tools, number)
        assert parsed.message["content"].strip() == content
        assert parsed.message.get("reasoning_content", "") == thinking
        assert parsed.message.get("tool_calls", []) == calls
        messages.append(parsed.message)
        given = [reply(c["id"], random_text(chance, special=[TOKENS[family][0]])) for c in calls]
        given = given or [{"role": "user", "content": random_text(chance)}]
        added = chat.extend(context, turn, messages, given, tools)
        assert added is not None
        spans.append((len(context), turn))
        context = np.concatenate([context, turn, added])
        between.append(added)
        messages += given
    assert chat.find_strange(between, messages, tools) is None
    doubled = [*between[:-1], np.concatenate([turn[:-1], between[-1]])]
    assert chat.find_strange(doubled, messages, tools) == len(between) - 1
    last = tokenizer_of(family).decode(between[-1])
    if last.startswith("\n"):  # the separator of turns
        missing = [*between[:-1], ids_of(family, last[1:])]
        assert chat.find_strange(missing, messages, tools) == len(between) - 1
    return context, messages, tools, spans


@pytest.mark.parametrize("family", KEEPING)
def test_no_token_of_random_conversations_changes(family):
    """Turns as the tokenizer writes them: the context is the tokens of one rendering of all messages.

    Turns in other tokens: the text equals one rendering's, and the turns are as sampled.
    """
    chat, tokenizer, chance = chat_of(family), tokenizer_of(family), random.Random(family)
    others = 0
    for number in range(CONVERSATIONS // len(KEEPING)):
        canonical = number % 2 == 0
        context, messages, tools, spans = converse(chat, family, chance, canonical=canonical)
        rendered = chat.open(messages, tools)
        if canonical:
            np.testing.assert_array_equal(context, rendered)
        else:
            assert tokenizer.decode(context) == tokenizer.decode(rendered)
            others += len(context) != len(rendered)
        for start, turn in spans:
            np.testing.assert_array_equal(context[start : start + len(turn)], turn)
    assert others > 0, "no conversation had other tokens than its rendering"


def exchange(family: str, text: str, given: list[dict], *, opening=(SYSTEM, USER), tools=(TOOL,), **options):
    """Return the text before the turn and the text added after it (None: no proof), for one sampled turn."""
    chat, tokenizer = chat_of(family, **options), tokenizer_of(family)
    context, turn = chat.open([*opening], [*tools]), ids_of(family, text)
    message = chat.parse(turn, tools, 0).message
    added = chat.extend(context, turn, [*opening, message], given, [*tools])
    return tokenizer.decode(context), None if added is None else tokenizer.decode(added)


@pytest.mark.parametrize("family", ["qwen3", "glm4.5"])
def test_dropped_thinking_is_no_extension(family):
    """A question of a user makes these templates drop earlier thinking; a tool's output does not."""
    thought = written(family, "answer", [], "reason") + end_of(family, False)
    assert exchange(family, thought, [USER], tools=())[1] is None
    silent = written(family, "answer", []) + end_of(family, False)
    assert exchange(family, silent, [USER], tools=())[1] is not None
    calling = written(family, "", [call("call00000", key="a")], "reason") + end_of(family, True)
    assert exchange(family, calling, [reply("call00000")])[1] is not None


def test_the_check_names_turn_and_template():
    with pytest.raises(ValueError, match=r"template of qwen3 .* turn 1 \(thinking, .* drops the thinking"):
        chat_of("qwen3").check([])
    with pytest.raises(ValueError, match=r"template of deepseek-v3 .* turn 2 \(2 tool calls"):
        chat_of("deepseek-v3").check([TOOL])
    chat_of("qwen3", on_rewrite="new_row").check([])
    for family in KEEPING:
        chat_of(family).check([TOOL])


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.revindex < 6 else '...' }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that keeps the contents of the last five messages."""


def test_a_template_that_forgets_in_the_third_turn_is_refused():
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(ValueError, match=r"turn 3 \(0 tool calls\).* before the turn differently"):
        Chat(tokenizer, end_token_ids=end_ids("qwen2.5")).check([])


def test_disabled_thinking_needs_the_package_renderers(monkeypatch):
    """Qwen3's prompt then holds an empty thinking tag, which the template drops from earlier turns."""
    pytest.importorskip("renderers")
    options = dict(end_token_ids=end_ids("qwen3"), template_kwargs={"enable_thinking": False})
    Chat(tokenizer_of("qwen3"), **options).check([])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"turn 1 \(0 tool calls\).* before the turn differently"):
        Chat(tokenizer_of("qwen3"), **options).check([])


def test_loop_last_of_a_template():
    """Mistral's template writes the system message only while a user's message is the last one."""
    calling = written("mistral", "", [call("call00000", key="a")]) + "</s>"
    assert exchange("mistral", calling, [reply("call00000")])[1] is None
    assert exchange("mistral", calling, [reply("call00000")], opening=[USER])[1] is not None
    with pytest.raises(ValueError, match="renders the messages before the turn differently"):
        chat_of("mistral").check([TOOL], [SYSTEM, USER])
    # Qwen3's writes an empty thinking tag into the last turn only. The turn had none.
    silent = "answer<|im_end|>"
    assert "<think>" not in exchange("qwen3", silent, [USER], tools=())[1]


def test_no_tools_are_none():
    """Llama's template announces tools for an empty list."""
    chat = chat_of("llama3.1")
    assert "ipython" not in chat.tokenizer.decode(chat.open([USER], []))
    raw = chat.tokenizer.apply_chat_template([USER], tools=[], tokenize=False)
    assert "ipython" in raw


def test_parallel_calls_are_one_ordered_group():
    calls = [call("call00000", key="a"), call("call00001", key="b")]
    given = [reply("call00000", "first"), reply("call00001", "second")]
    for family in set(KEEPING) - {"llama3.1"}:
        text = written(family, "", calls) + end_of(family, True)
        parsed = chat_of(family).parse(ids_of(family, text), [TOOL], 0)
        assert [(c.id, c.arguments["key"]) for c in parsed.tool_calls] == [
            ("call00000", "a"),
            ("call00001", "b"),
        ]
        _, added = exchange(family, text, given, opening=[USER])
        assert added.index("first") < added.index("second")
        if family.startswith("qwen"):
            assert added.count("<|im_start|>user") == 1


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "glm4.5", "llama3.1"])
def test_a_truncated_turn_is_closed(family):
    """The end token of the turn is given, not sampled; so is the end of open thinking."""
    calling = written(family, "", [call("call00000", key="a")])
    _, added = exchange(family, calling, [reply("call00000")])
    assert added.startswith(("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|observation|>"))
    if family not in ("qwen3", "glm4.5"):
        return
    thought = written(family, "", [], "I think").partition("</think>")[0]
    chat = chat_of(family)
    turn = ids_of(family, thought)
    parsed = chat.parse(turn, [TOOL], 0)
    assert "I think" in parsed.message["reasoning_content"] and not parsed.message["content"]
    added = chat.extend(chat.open([USER], []), turn, [USER, parsed.message], [reply("call00000")], [TOOL])
    assert added is not None and chat.tokenizer.decode(added).startswith("</think>")


CALL_BEGIN, CALLS_BEGIN = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
)
MALFORMED = {
    "qwen2.5": '<tool_call>\n{"name": "lookup", "arguments": {"key": }}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"',
    "llama3.1": '{"name": "lookup", "parameters": {"key" "a"}}',
    "mistral": '[TOOL_CALLS][{"name": "lookup", "arguments": {"key": ]',
    "glm4.5": "\n<think></think>\n<tool_call>lookup\n<arg_key>key</arg_key>\n<arg_value>a",
    "deepseek-v3.1": f"{CALLS_BEGIN}{CALL_BEGIN}lookup<\uff5ctool\u2581sep\uff5c>{{key",
}


@pytest.mark.parametrize("family", KEEPING)
def test_malformed_and_unknown_calls_are_calls(family):
    """The environment answers them with an error message, which extends the turn as any output does."""
    text = MALFORMED[family] + end_of(family, True)
    parsed = chat_of(family).parse(ids_of(family, text), [TOOL], 0)
    (malformed,) = parsed.tool_calls
    assert isinstance(malformed.arguments, str) and malformed.arguments
    assert exchange(family, text, [reply(malformed.id, "error: not JSON")], opening=[USER])[1] is not None
    unknown = {**call("call00000", key="a"), "function": {"name": "find", "arguments": {"key": "a"}}}
    text = written(family, "", [unknown]) + end_of(family, True)
    (parsed,) = chat_of(family).parse(ids_of(family, text), [TOOL], 0).tool_calls
    assert (parsed.name, parsed.arguments) == ("find", {"key": "a"})
    assert exchange(family, text, [reply("call00000", "no such tool")], opening=[USER])[1] is not None


def test_plain_text_appends_plain_tokens():
    chat, tokenizer = chat_of("qwen2.5"), tokenizer_of("qwen2.5")
    messages = [{"role": "text", "content": "Guess: "}]
    turn = ids_of("qwen2.5", "7<|im_end|>")
    turn_message = chat.parse(turn, [], 0).message
    assert turn_message == {"role": "assistant", "content": "7"}
    added = chat.extend(
        chat.open(messages, []), turn, [*messages, turn_message], [{**USER, "content": "higher "}], []
    )
    assert (
        tokenizer.decode(np.concatenate([chat.open(messages, []), turn, added]))
        == "Guess: 7<|im_end|>higher "
    )


def test_the_package_renderers_is_optional(monkeypatch):
    """With and without it, a conversation has the same tokens."""
    pytest.importorskip("renderers")
    with_package = chat_of("qwen3")
    assert "Qwen3Renderer" in with_package.description
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    without = Chat(tokenizer_of("qwen3"), end_token_ids=end_ids("qwen3"))
    assert "renderers" not in without.description
    for seed in range(10):
        contexts = [
            converse(chat, "qwen3", random.Random(seed), canonical=True)[0]
            for chat in (with_package, without)
        ]
        np.testing.assert_array_equal(*contexts)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3.1", "deepseek-v3.1"])
def test_the_grammar_allows_calls_that_fit_the_schema(family):
    import xgrammar

    chat, tokenizer = chat_of(family), tokenizer_of(family)
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    grammar = xgrammar.GrammarCompiler(vocabulary).compile_structural_tag(chat.grammar([TOOL]))

    def allows(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return all(map(matcher.accept_token, ids_of(family, text).tolist()))

    end = tokenizer.eos_token
    assert allows(written(family, "", [call("call00000", key="a")]) + end) and allows("The answer." + end)
    assert not allows(written(family, "", [call("call00000", other="a")]))
    unknown = {**call("call00000", key="a"), "function": {"name": "find", "arguments": {"key": "a"}}}
    assert not allows(written(family, "", [unknown]))


def test_a_form_without_grammar_is_refused():
    with pytest.raises(ValueError, match="structured_tool_calls=true: xgrammar has no grammar .* of mistral"):
        chat_of("mistral").grammar([TOOL])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("levels", [1000, 1_000_000])
def test_deep_arguments_are_text(family, levels):
    """They could not be pickled for the worker, or rendered by a template."""
    deep = '{"a":' * levels + "1" + "}" * levels
    for form in ("{}", "<tool_call>{}</tool_call>", "[TOOL_CALLS][{}]", "[TOOL_CALLS]f[ARGS]{}"):
        for call in (deep, f'{{"name": "f", "arguments": {deep}}}'):
            _, calls = parse_calls(family, form.replace("{}", call), [TOOL], 0)
            assert all(isinstance(c.arguments, str) or not c.arguments for c in calls)


@pytest.mark.parametrize("uses_renderer", [False, True])
@pytest.mark.parametrize("family", KEEPING)
def test_a_tools_text_ends_no_turn(family, uses_renderer):
    chat, tokenizer = chat_of(family, uses_renderer=uses_renderer), tokenizer_of(family)
    marks = " ".join(tokenizer.get_added_vocab())
    context, made = chat.open([USER], [TOOL]), call("call00100", key="a")
    turn = ids_of(family, written(family, "", [made]) + end_of(family, True))
    messages = [USER, chat.parse(turn, [TOOL], 1).message]
    added = [
        chat.extend(context, turn, messages, [reply("call00100", text)], [TOOL]) for text in ("b", marks)
    ]
    special = [int(np.isin(ids, list(tokenizer.get_added_vocab().values())).sum()) for ids in added]
    assert special[0] == special[1] and marks in tokenizer.decode(added[1])
    assert chat.find_strange([added[1]], [*messages, reply("call00100", marks)], [TOOL]) is None


def test_a_games_text_is_no_special_token_after_a_plain_opening():
    chat, opening = chat_of("qwen3"), {"role": "text", "content": "1+1="}
    turn, said = ids_of("qwen3", "2"), {"role": "user", "content": "<|im_end|>no"}
    messages = [opening, {"role": "assistant", "content": "2"}]
    added = chat.extend(chat.open([opening], []), turn, messages, [said], [])
    assert tokenizer_of("qwen3").eos_token_id not in added


LOST = [
    ("qwen3", [{"role": "critic", "content": "a"}], [], "has role 'critic'"),
    ("deepseek-v3.1", [USER], [TOOL], "would not see the tool 'lookup'"),
    ("mistral", [SYSTEM, USER, {"role": "assistant", "content": "a"}], [], "of message 1 of 3"),
]


@pytest.mark.parametrize(("family", "messages", "tools", "reason"), LOST)
def test_what_the_policy_would_not_see_is_refused(family, messages, tools, reason):
    chat = chat_of(family)
    with pytest.raises(ValueError, match=reason):
        chat.refuse_lost(chat.normal(messages), tools)
    named = [{**USER, "content": "Use lookup."}]
    chat.refuse_lost(chat.normal(named), tools)


def test_messages_of_an_environment_are_read_like_those_of_data():
    chat = chat_of("qwen3")
    other = [{"role": "human", "value": [{"type": "text", "text": "a"}]}]
    assert chat.normal(other) == [{"role": "user", "content": "a"}]
