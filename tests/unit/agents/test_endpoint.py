"""Tests of the server for agents, with the real client library and a consumer of its queue."""

import json
import threading
import urllib.error
import urllib.request

import httpx
import numpy as np
import pytest

from rl.data.chat_template import TOOL
from rl.features.agents.chat import Chat
from rl.features.agents.endpoint import Endpoint, EndpointReply, RefusedRequest, new_messages
from tests.chat_templates import end_ids, tokenizer_of

openai = pytest.importorskip("openai")
TURNS = [
    '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call><|im_end|>',
    'I look.\n<tool_call>\n{"name": "lookup", "arguments": {"key": "b"}}\n</tool_call><|im_end|>',
    "The answer is 42.<|im_end|>",
]


class Consumer:
    """Answers requests with given turns, as the source of the engine's events does, and keeps the tokens."""

    def __init__(self, turns: list[str]):
        self.tokenizer = tokenizer_of("qwen2.5")
        self.chat = Chat(self.tokenizer, end_token_ids=end_ids("qwen2.5"))
        self.endpoint, self.turns = Endpoint(self.tokenizer, context_tokens=1024), turns
        self.seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """Context, tokens and log-probs of each turn."""
        self.known: list[dict] = []
        self.limits: list[int | None] = []
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> "Consumer":
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.thread.join(10)
        self.endpoint.shutdown()

    def run(self) -> None:
        for number, text in enumerate(self.turns):
            request = self.endpoint.requests.get(timeout=30)
            self.limits.append(request.max_tokens)
            turn = np.array(self.tokenizer(text)["input_ids"], np.int32)
            if request.token_ids is not None:
                context = request.token_ids
            elif not self.seen:
                context = self.chat.open(request.messages, request.tools)
            else:
                given = new_messages(self.known, request.messages)
                before, last, _ = self.seen[-1]
                added = self.chat.extend(before, last, self.known, given, request.tools)
                context = np.concatenate([before, last, added])
            message = self.chat.parse(turn, request.tools, number).message
            self.known = [*(request.messages or []), message]
            logprobs = -np.arange(1, len(turn) + 1, dtype=np.float32) / 8
            self.seen.append((context, turn, logprobs))
            request.reply.set_result(EndpointReply(context, turn, logprobs, "stop", message))


def test_the_openai_client_through_three_turns_with_tools():
    """The client receives the ids and log-probs of the queue's consumer."""
    with Consumer(TURNS) as consumer:
        key = consumer.endpoint.open("0.0")
        client = openai.OpenAI(base_url=consumer.endpoint.base_url, api_key=key, max_retries=0)
        messages: list = [{"role": "user", "content": "question"}]
        for number in range(3):
            completion = client.chat.completions.create(
                model="any",
                messages=messages,
                tools=[TOOL],
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            choice = completion.choices[0]
            context, turn, logprobs = consumer.seen[number]
            assert completion.prompt_token_ids == context.tolist()
            assert choice.token_ids == turn.tolist()
            assert [entry.logprob for entry in choice.logprobs.content] == logprobs.tolist()
            messages.append(choice.message)
            for call in choice.message.tool_calls or []:
                value = json.loads(call.function.arguments)["key"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"value of {value}"})
        assert choice.finish_reason == "stop" and choice.message.content == "The answer is 42."
        text = consumer.tokenizer.decode(consumer.seen[-1][0])
        assert text.index("value of a") < text.index("I look.") < text.index("value of b")


def test_a_stream_has_the_turn_in_one_piece():
    with Consumer(TURNS[:1]) as consumer:
        key = consumer.endpoint.open("0.0")
        client = openai.OpenAI(base_url=consumer.endpoint.base_url, api_key=key, max_retries=0)
        with client.chat.completions.stream(
            model="any",
            messages=[{"role": "user", "content": "question"}],
            tools=[TOOL],
            stream_options={"include_usage": True},
        ) as stream:
            completion = stream.get_final_completion()
        (call,) = completion.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("lookup", {"key": "a"})
        assert completion.choices[0].finish_reason == "tool_calls"
        assert completion.usage.completion_tokens == len(consumer.seen[0][1])


def test_tokens_in_and_tokens_out():
    with Consumer(TURNS[2:]) as consumer:
        key = consumer.endpoint.open("0.0")
        url = consumer.endpoint.base_url.removesuffix("/v1") + "/inference/v1/generate"
        for ids in ([5, 1 << 30], [5, 1.5], [True]):
            refused = json.dumps({"token_ids": ids}).encode()
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(
                    urllib.request.Request(url, refused, {"Authorization": f"Bearer {key}"}), timeout=30
                )
        body = json.dumps({"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": -1}}).encode()
        http = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(http, timeout=30) as answer:
            (choice,) = json.load(answer)["choices"]
        context, turn, logprobs = consumer.seen[0]
        assert context.tolist() == [5, 6, 7] and consumer.limits == [None]
        assert choice["token_ids"] == turn.tolist()
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == logprobs.tolist()


class LosesAnswers(httpx.HTTPTransport):
    """Gives up waiting for the answers of the first two attempts, as after a time-out."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts, self.is_last = 0, threading.Event()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.attempts += 1
        request.extensions["timeout"]["read"] = 0.2 if self.attempts <= 2 else 30.0
        if self.attempts > 2:
            self.is_last.set()
        return super().handle_request(request)


def test_a_repeated_conversation_gets_the_same_turn():
    """Clients repeat a request after they missed its answer, here twice; only one turn is trained on."""
    consumer, transport = Consumer(TURNS[2:]), LosesAnswers()
    endpoint, asked = (
        consumer.endpoint,
        {"model": "any", "messages": [{"role": "user", "content": "question"}]},
    )
    client = openai.OpenAI(
        base_url=endpoint.base_url,
        api_key=endpoint.open("0.0"),
        http_client=httpx.Client(transport=transport),
    )
    ids: list[list[int]] = []

    def ask(**options) -> None:
        completion = client.chat.completions.create(**asked, extra_body={"return_token_ids": True}, **options)
        ids.append(completion.choices[0].token_ids)

    try:
        thread = threading.Thread(target=ask)
        thread.start()
        assert transport.is_last.wait(60)
        consumer.run()  # gives one turn, while the third attempt waits
        thread.join()
        ask()  # the agent repeats it itself, after the turn was given
        assert ids == [consumer.seen[0][1].tolist()] * 2 and endpoint.requests.empty()
    finally:
        endpoint.shutdown()


def test_only_the_previous_learned_request_is_repeated():
    """A conversation that another one followed is sampled again, and every request that is not learned."""
    with Consumer(TURNS[2:] * 5) as consumer:
        consumer.chat.extend = lambda *_: np.zeros(0, np.int32)  # what follows what is not tested here
        key = consumer.endpoint.open("0.0")
        client = openai.OpenAI(base_url=consumer.endpoint.base_url, api_key=key)
        for content, learned in (("a", True), ("b", True), ("a", True), ("c", False), ("c", False)):
            messages: list = [{"role": "user", "content": content}]
            client.chat.completions.create(model="any", messages=messages, store=learned)
    assert len(consumer.seen) == 5


def test_keys_and_refusals():
    """A key is valid while its trajectory lives; what cannot be served is an error that names the reason."""
    endpoint = Endpoint(tokenizer_of("qwen2.5"), context_tokens=1024)
    try:
        key = endpoint.open("0.0")

        def ask(api_key: str, **options) -> None:
            client = openai.OpenAI(base_url=endpoint.base_url, api_key=api_key, max_retries=0)
            client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "q"}], **options
            )

        assert endpoint.base_url.startswith("http://127.0.0.1:")
        with pytest.raises(openai.AuthenticationError):
            ask("wrong")
        with pytest.raises(openai.BadRequestError, match="n > 1"):
            ask(key, n=2)
        with pytest.raises(openai.BadRequestError, match="max_tokens='7' must be an integer"):
            ask(key, max_tokens="7")
        for malformed in (
            {"tools": [{}]},
            {"stream": True, "stream_options": [1]},
            {"extra_headers": {"Content-Type": "application/json; charset=none"}},
        ):
            with pytest.raises(openai.BadRequestError, match="malformed"):
                ask(key, **malformed)

        def refuse() -> None:
            request = endpoint.requests.get(timeout=30)
            assert (request.session, request.max_tokens) == ("0.0", 7)
            request.reply.set_exception(RefusedRequest("no room for another turn", is_spent=True))
            endpoint.requests.get(timeout=30)
            endpoint.close("0.0")

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        with pytest.raises(openai.BadRequestError, match="no room") as refused:
            ask(key, max_tokens=7)
        assert refused.value.code == "limits_used_up"
        with pytest.raises(openai.BadRequestError, match="has ended"):
            ask(key)
        thread.join(10)
        with pytest.raises(openai.AuthenticationError):
            ask(key)
    finally:
        endpoint.shutdown()


def test_a_changed_conversation_has_no_new_messages():
    known = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "reasoning_content": "r"}]
    same = [known[0], {"role": "assistant", "content": ""}, {"role": "user", "content": "next"}]
    assert new_messages(known, same) == same[2:]
    assert new_messages(known, [{**known[0], "content": "other"}, *same[1:]]) is None
    assert new_messages(known, same[:1]) is None
