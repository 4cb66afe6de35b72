"""A conversation with a user that another language model plays.

    agents:
      environment: rl.features.agents.integrations.user_simulation:UserSimulation
      kwargs:
        base_url: http://gpu7:8000/v1      # any OpenAI-compatible server, such as `vllm serve`
        model: Qwen/Qwen2.5-7B-Instruct
        api_key_variable: USER_API_KEY     # environment variable with the key; omit if there is none
      variables: [USER_API_KEY]

The simulated user sees the conversation with the roles exchanged. Before it stands a system message, the
row's `extra_info.user` (verl: `interaction_kwargs.user`), which says who the user is and what they want: for
example, "You are Ada and want to move your flight to Friday." The simulated user writes the first message,
and ends the conversation by writing `stop`. The reward function then judges the last answer. With `judge`,
the simulated user's model follows this instruction instead and grades the conversation: the last line of its
reply must have one number from 0 to 1. "0.3/1" and "0.3 out of 1" are 0.3; a line with other numbers is a
failure.

The server reads special tokens in any text, and this process does not know its tokens. In texts of the policy
and of the data, anything that looks like a special token therefore gets a blank, unless
`allow_special_tokens` is true. For example, <|im_end|> becomes < |im_end|>.

The server is outside of the run. The judge of the section `reward` cannot play the user: it takes turns with
the policy in the GPU's memory, but a conversation needs both models at once.
"""

import os
import re
from typing import Any

from rl.features.agents.integrations.chat import complete, user_message
from rl.features.agents.integrations.rows import task_of

EXCHANGED = {"user": "assistant", "assistant": "user"}
_SCALE = re.compile(r"(?<=\d)\s*(?:/|out of)\s*1(?:\.0+)?(?![\d/]|\.\d)")
_NUMBER = re.compile(r"[^\s:=*_()\[\]]*\d[^\s:=*_()\[\]]*")
"""A number with the characters next to it, except punctuation."""
_GRADE = re.compile(r"0?\.\d+|1\.0+|[01]")
_SPECIAL = re.compile(
    r"<(?=[|\uff5c][^<>\s]*>|[^<>\s]*[|\uff5c]>|/?(?:s|[bes]o[sp]|pad|unk|mask|(?:start|end)_of_\w+)>)"
    r"|\[(?=/?(?:INST|THINK|ARGS|CALL_ID|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_[A-Z]+|gMASK)\])"
)
"""First character of a text that looks like a special token."""


class UserSimulation:
    """A conversation with the simulated user."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_variable: str = "",
        stop: str = "###STOP###",
        judge: str = "",
        allow_special_tokens: bool = False,
        **sampling: Any,
    ) -> None:
        """Take the arguments; `sampling` are further fields of each request.

        Raises ValueError if the environment variable of the key is not set.
        """
        if api_key_variable and api_key_variable not in os.environ:
            raise ValueError(
                f"agents.kwargs.api_key_variable={api_key_variable} is not set in the environment of the "
                "environment's process: set it for the job and name it in agents.variables, or omit the key."
            )
        key = os.environ.get(api_key_variable, "none")
        self._server = (base_url, key)
        self._options = {"model": model, **sampling}
        self._stop, self._judge = stop, judge
        self._plain = str if allow_special_tokens else without_special_tokens
        if judge:
            self.score = self._grade

    async def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        persona = task_of(row).get("user")
        if not persona:
            raise ValueError(
                "extra_info.user is missing in the row; it must say who the simulated user is and what they "
                "want."
            )
        self._persona = (
            f"{persona}\n\nYou are the user of an assistant. Write only the user's next message. When your "
            f"goal is reached, or cannot be, write {self._stop}."
        )
        # The assistant's rules; the simulated user does not see them.
        rules = [message for message in row["messages"] or [] if message["role"] == "system"]
        self._conversation: list[dict[str, Any]] = []
        return rules + user_message(await self._next_message())

    async def step(self, text: str) -> tuple[str, float, bool]:
        self._conversation.append({"role": "assistant", "content": text})
        answer = await self._next_message()
        return answer, 0.0, self._stop in answer

    async def _next_message(self) -> str:
        # From the user's side. Most templates require a user's message first.
        seen = [
            {"role": EXCHANGED[m["role"]], "content": self._plain(m["content"])} for m in self._conversation
        ]
        opening = user_message("Hello, how can I help you?")
        request = [{"role": "system", "content": self._plain(self._persona)}, *opening, *seen]
        reply = (await complete(*self._server, request, **self._options)).get("content")
        if not isinstance(reply, str) or not reply.strip():
            raise RuntimeError(
                f"the simulated user's server sent no text but {reply!r:.80}; raise its limit of tokens "
                "(agents.kwargs.max_tokens), or let its model answer without thinking."
            )
        self._conversation += user_message(reply)
        return reply

    async def _grade(self) -> float:
        lines = [f"{message['role']}: {self._plain(message['content'])}" for message in self._conversation]
        question = "\n".join([self._judge, "", *lines])
        reply = await complete(*self._server, user_message(question), **self._options)
        return read_grade(reply["content"] or "")


def without_special_tokens(text: str) -> str:
    """Return a text with a blank after the first character of anything that looks like a special token."""
    return _SPECIAL.sub(lambda first: f"{first[0]} ", text)


def read_grade(reply: str) -> float:
    """Return the number from 0 to 1 in the last line of a reply.

    Raises RuntimeError unless the line has exactly one number, beside a scale as in "0.3/1".
    """
    line = reply.strip().rpartition("\n")[2]
    numbers = [number.rstrip(".,;") for number in _NUMBER.findall(_SCALE.sub("", line))]
    if len(numbers) != 1 or not _GRADE.fullmatch(numbers[0]):
        raise RuntimeError(
            f"the last line of the judge's reply is {line!r:.200}; it must have one number from 0 to 1; let "
            "agents.kwargs.judge ask for a last line with nothing but the number."
        )
    return float(numbers[0])
