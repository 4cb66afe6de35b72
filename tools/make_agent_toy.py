"""Make a task of several turns for agents, with a tokenizer, warm-up data and a model for a laptop CPU.

    lockstep data agent-toy guess --out runs/guess-toy
    lockstep data agent-toy multiply --out runs/multiply-toy
    lockstep data agent-toy multiply --experts 8 --out runs/lab-toy
    lockstep data agent-toy tictactoe --out runs/tictactoe-toy

guess: a number from 1 to 16 in at most five guesses; the environment answers higher or lower. multiply: the
product of two numbers of two digits, with a calculator as tool. tictactoe: the model plays both sides. The
script writes

    OUT/train.parquet     rows for RL, with the columns that lockstep data writes
    OUT/test.parquet      rows for validation; of multiply, 500 held-out problems
    OUT/warm_up.parquet   turns for supervised fine-tuning, most of them bad
    OUT/model/            a Qwen2 (--experts: a Qwen3-MoE) with random weights, and a tokenizer of characters
                          and a few words

configs/agents/ has the environments and configurations. Equal arguments give equal files; nothing is
downloaded.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from tools.make_toy import build_model, build_tokenizer, save, write_rows

CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{\"name\": \"{{ call['function']['name'] }}\", "
    "\"arguments\": {{ call['function']['arguments'] | tojson }}}</tool_call>"
    "{% endfor %}<eos>"
    "{% elif message['role'] == 'tool' %}<tool>{{ message['content'] }}"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Qwen's form of tool calls without line breaks. Of the tools it renders only names, which keeps prompts
short."""
CALCULATOR = {"type": "function", "function": {"name": "calculate"}}
CALL = ["<tool_call>", '{"name": "', "calculate", '", "arguments": {"expression": "', '"}}', "</tool_call>"]
WORDS = {"guess": ["higher", "lower", "correct", *map(str, range(10, 17))], "multiply": CALL, "tictactoe": []}
"""Words that are one token each, by task. They keep turns short: a number, or a tool call, and an end."""
HIDDEN = {"guess": 64, "multiply": 128, "tictactoe": 64}
"""Hidden size by task. Heads have 32 channels, the fewest that vLLM's attention supports on CPU."""
GUESSES = 5
NUM_HELD_OUT = 500
NUM_GAMES = 2000
CALL_SHARE, USE_SHARE = 0.3, 0.4
"""Shares of the warm-up's turns that call the tool, and that use what it returned."""

ToyTurn = tuple[list[dict[str, Any]], list[dict[str, Any]], str]
"""Messages before a turn of the assistant, the tools that it may call, and its text."""
ToyTask = tuple[dict[str, list[tuple[list[dict[str, Any]], str]]], list[ToyTurn]]
"""Prompts and answers for RL by split, and turns for the warm-up."""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def guess(rng: np.random.Generator) -> ToyTask:
    """Return ten rows of each number, one for validation, and games with random guesses."""
    start = [user("1 to 16?")]
    rows = [(start, str(number)) for number in range(1, 17)]
    turns: list[ToyTurn] = []
    for _ in range(NUM_GAMES):
        number, messages = int(rng.integers(1, 17)), list(start)
        for _ in range(GUESSES):
            guessed = int(rng.integers(1, 17))
            turns.append((list(messages), [], str(guessed)))
            if guessed == number:
                break
            messages += [assistant(str(guessed)), user("higher" if guessed < number else "lower")]
    return {"train": rows * 10, "test": rows}, turns


def multiply(rng: np.random.Generator) -> ToyTask:
    """Return all problems with two numbers of two digits, and answers that rarely use the tool.

    With the tool, CALL_SHARE of the turns call it, and the others guess. USE_SHARE of the turns after a call
    repeat its result, and the others end with a question mark. Without the tool every answer is right, so
    that the model can also learn to multiply without it.
    """
    problems = rng.permutation([(a, b) for a in range(10, 100) for b in range(10, 100)]).tolist()
    rows = [([user(f"{a}*{b}=")], str(a * b)) for a, b in problems]
    turns: list[ToyTurn] = []
    train = problems[NUM_HELD_OUT:]
    short = [(a, b) for a, b in train if a * b < 1000]
    for a, b in train + 3 * short:  # as many products of three digits as of four, since both are copied
        calls, uses = rng.random() < CALL_SHARE, rng.random() < USE_SHARE
        call = "".join([*CALL[:4], f"{a}*{b}", *CALL[4:]])
        question, result = user(f"{a}*{b}="), {"role": "tool", "content": str(a * b)}
        turns += [
            ([question], [], str(a * b)),
            ([question], [CALCULATOR], call if calls else str(rng.integers(100, 10000))),
            ([question, assistant(call), result], [CALCULATOR], str(a * b) if uses else "?"),
        ]
    return {"train": rows[NUM_HELD_OUT:], "test": rows[:NUM_HELD_OUT]}, turns


def tictactoe(rng: np.random.Generator) -> ToyTask:
    """Return equal rows, and games with random squares as moves, taken ones too."""
    start = [user("x")]
    rows = [(start, "")] * 64
    turns: list[ToyTurn] = []
    for _ in range(NUM_GAMES):
        messages = list(start)
        for move in range(int(rng.integers(1, 10))):
            square = str(rng.integers(1, 10))
            turns.append((list(messages), [], square))
            messages += [assistant(square), user("xo"[(move + 1) % 2])]
    return {"train": rows, "test": rows}, turns


TASKS = {"guess": guess, "multiply": multiply, "tictactoe": tictactoe}


def make_agent_toy(task: str, out: str | Path, *, seed: int = 0, experts: int = 0) -> Path:
    """Write data and model of `task` to `out` (created if needed) and return `out`.

    seed: determines the data and the weights.
    experts: number of experts per layer; 0 makes a dense model.
    """
    out = Path(out)
    tokenizer = build_tokenizer(WORDS[task], special=["<tools>", "<tool>"], chat_template=CHAT_TEMPLATE)
    hidden = HIDDEN[task]
    model = build_model(
        tokenizer,
        seed=seed,
        experts=experts,
        hidden=hidden,
        heads=hidden // 32,
        kv_heads=2,
        intermediate=2 * hidden,
    )
    splits, turns = TASKS[task](np.random.default_rng(seed))
    out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        write_rows(out / f"{split}.parquet", task, rows)
    rendering: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    warm_up = [
        (tokenizer.apply_chat_template(messages, **rendering | {"tools": tools or None}), text)
        for messages, tools, text in turns
    ]
    write_rows(out / "warm_up.parquet", task, warm_up)
    save(model, tokenizer, out / "model")
    return out


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("task", choices=TASKS, help="the task")
    add("--out", required=True, help="directory to write to")
    add("--seed", type=int, default=0, help="seed of the data and the weights")
    add("--experts", type=int, default=0, help="experts per layer of a mixture; 0 makes a dense model")
    arguments = vars(parser.parse_args(argv))
    out = make_agent_toy(**arguments)
    print(f"wrote {out}/train.parquet, test.parquet, warm_up.parquet and model")


if __name__ == "__main__":
    main()
