import json

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rl.config.functions import load_function
from tests.spawn import ROOT
from tools.make_agent_toy import TASKS, WORDS, make_agent_toy

GAMES = ROOT / "configs" / "agents"


@pytest.mark.parametrize("task", TASKS)
def test_warm_up_turns_are_those_of_the_chat(tmp_path, task):
    out = make_agent_toy(task, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert all(len(tokenizer(word)["input_ids"]) == 1 for word in WORDS[task])
    rows = pq.read_table(out / "warm_up.parquet").to_pylist()
    for row in rows[:100]:
        assert tokenizer.decode(tokenizer(row["prompt"])["input_ids"]) == row["prompt"]
        text = row["reward_model"]["ground_truth"]
        assert row["prompt"].endswith("<assistant>") and text
        if "<tool_call>" in text:
            call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            message = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
            assert tokenizer.apply_chat_template([message], tokenize=False) == f"<assistant>{text}<eos>"


def test_guesses_are_answered_until_they_are_used_up():
    game = load_function(f"{GAMES}/guess.py:GuessTheNumber", key="environment")()
    game.reset({"messages": [], "ground_truth": "6"})
    assert [game.step(text) for text in ("8", "4", "x", "5")] == [
        ("lower", 0.0, False),
        ("higher", 0.0, False),
        ("higher", 0.0, False),
        ("higher", 0.0, False),
    ]
    assert game.step("7") == ("lower", 0.0, True) and game.score()["score"] == 0
    game = load_function(f"{GAMES}/guess.py:GuessTheNumber", key="environment")()
    game.reset({"messages": [], "ground_truth": "6"})
    assert game.step("6") == ("correct", 0.0, True) and game.score()["score"] == 1


@pytest.mark.parametrize(
    "moves, end", [("14253", "won"), ("123546879", "draw"), ("11", "forbidden"), ("0", "forbidden")]
)
def test_tictactoe_ends_by_its_rules(moves, end):
    game = load_function(f"{GAMES}/tictactoe.py:TicTacToe", key="environment")()
    game.reset({"messages": []})
    *replies, last = [game.step(move) for move in moves]
    assert replies == [("xo"[(i + 1) % 2], 0.0, False) for i in range(len(replies))]
    assert last == (end, {"won": 1.0, "draw": 0.0, "forbidden": -1.0}[end], True)
