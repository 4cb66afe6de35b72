"""Write rows with tasks from a generator: one JSON object per line, verl's columns.

    lockstep data tasks arithmetic --out DIR
    lockstep data tasks reasoning-gym --name chain_sum,countdown --out DIR
    lockstep data tasks reasoning-gym --name chain_sum --options '{"max_terms": 3}' --out DIR
    lockstep data tasks seeds --name game:GuessTheNumber-v0-easy --out DIR
    lockstep data tasks harbor --options '{"tasks": "DIRECTORY"}' --num-test 8 --out DIR
    PYTHON -m lockstep data tasks verifiers --options '{"taskset": {"id": "my-taskset"}}' --out DIR

Each writes OUT/train.jsonl and OUT/test.jsonl with --num-train and --num-test rows; no task is in both.

    arithmetic     sums of two numbers below 30, as questions and as stories, after two examples; for the
                   reward rl.rewards.gsm8k with method=flexible. At most 1,134, three about each pair
    reasoning-gym  puzzles of the generators in --name, which take turns, each with --options; for the reward
                   reasoning_gym (docs/agents.md)
    seeds          rows with extra_info.env_id (the names in --name take turns) and extra_info.seed, for gem,
                   textarena, and any environment that makes its task from a seed
    harbor         the directories below "tasks" in --options, in the format of Harbor or Terminal-Bench; for
                   the environment of docs/agents.md. The first ones are test.jsonl's
    verifiers      the tasks of the taskset in --options, which is verifiers' block [env]; PYTHON is the
                   interpreter that has verifiers. The first tasks are test.jsonl's
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import combinations, islice
from pathlib import Path
from typing import Any

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config import wing
from rl.config.command_line import make_parser

Row = dict[str, Any]


def row(data_source: str, prompt: str, ground_truth: str, **extra_info: Any) -> Row:
    """Return the columns that training reads."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


NAMES = "Anna Ben Clara David Emma Felix Grace Hugo Ivy Jack Kate Leo Mia Noah Olga Paul".split()
THINGS = "apples books coins eggs flowers marbles pencils shells stamps stones".split()
EXAMPLES = [
    {"role": "user", "content": "What is 12 plus 5?"},
    {"role": "assistant", "content": "12 + 5 = 17"},
    {"role": "user", "content": "Anna has 3 eggs and finds 8 more. How many eggs does Anna have now?"},
    {"role": "assistant", "content": "3 + 8 = 11"},
]
"""Turns before each question, which show the form of an answer."""


def arithmetic_rows(seed: int) -> Iterator[Row]:
    """Yield 1,134 questions: three about each of the 378 pairs of different numbers from 2 to 29.

    The questions about a pair follow each other, so a held-out pair is new to the model in either order.
    """
    rng = random.Random(seed)
    pairs = list(combinations(range(2, 30), 2))
    rng.shuffle(pairs)
    for place, pair in enumerate(pairs):
        a, b = rng.sample(pair, 2)
        first, second = rng.sample(NAMES, 2)
        found, counted = rng.sample(THINGS, 2)
        questions = {
            "plus": f"What is {a} plus {b}?",
            "finds": f"{first} has {a} {found} and finds {b} more. How many {found} does {first} have now?",
            "together": f"{first} has {a} {counted} and {second} has {b}. "
            f"How many {counted} do they have together?",
        }
        for number, (kind, question) in enumerate(questions.items()):
            new = row(f"arithmetic/{kind}", question, str(a + b), index=3 * place + number)
            yield new | {"prompt": [*EXAMPLES, *new["prompt"]]}


def reasoning_gym_rows(names: list[str], options: Row, seed: int, size: int) -> Iterator[Row]:
    """Yield puzzles of each generator in turn. Raises ValueError for an unknown generator or option."""
    reasoning_gym = wing.door_of("agents", "puzzles", needed_by="reasoning_gym")
    sources = [reasoning_gym.puzzles(name, options, seed, -(-size // len(names))) for name in names]
    for i in range(size):
        name = names[i % len(names)]
        question, packed = next(sources[i % len(names)])
        yield row(f"reasoning_gym/{name}", f"{question}\n\n{reasoning_gym.INSTRUCTION}", packed, index=i)


def seed_rows(names: list[str], seed: int, size: int) -> Iterator[Row]:
    """Yield a row per seed; environments replace its prompt."""
    for i in range(size):
        name = names[i % len(names)]
        yield row(name, f"{name}, seed {seed + i}", "", env_id=name, seed=seed + i, index=i)


def verifiers_rows(env: Row, size: int) -> Iterator[Row]:
    """Yield the first tasks of a taskset."""
    verifiers = wing.door_of("agents", "tasksets", needed_by="verifiers")
    for i, (prompt, task) in enumerate(verifiers.tasks(env, size)):
        yield row(env["taskset"]["id"], prompt, "", task=task, index=i)


def harbor_rows(options: Row) -> Iterator[Row]:
    """Yield a row per task directory. Raises ValueError for a task that cannot run."""
    harbor = wing.door_of("containers", "tasks", needed_by="harbor")
    top = Path(options.get("tasks", "")).resolve()
    tasks = [
        harbor.read_task(path) for path in sorted(path for path in top.iterdir() if harbor.is_task(path))
    ]
    for sentence in harbor.unmet(tasks):
        print(f"note: {sentence}", file=sys.stderr)
    for i, task in enumerate(tasks):
        yield row(top.name, task.instruction, "", task=str(task.path), index=i)


def finite_rows(kind: str, options: Row, seed: int, size: int) -> Iterator[Row]:
    """Yield the rows of a kind that has only so many tasks."""
    if kind == "arithmetic":
        return arithmetic_rows(seed)
    return harbor_rows(options) if kind == "harbor" else verifiers_rows(options, size)


def make_tasks(arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """Return the rows of each split. Raises ValueError for options that do not fit."""
    kind, names, options = arguments.kind, arguments.name.split(","), json.loads(arguments.options)
    sizes = {"test": arguments.num_test, "train": arguments.num_train}
    if kind in ("arithmetic", "harbor", "verifiers"):
        size = sum(sizes.values())
        rows = list(islice(finite_rows(kind, options, arguments.seed, size), size))
        if len(rows) <= sizes["test"]:
            raise ValueError(
                f"--num-test={sizes['test']} leaves no tasks for training, because there are only "
                f"{len(rows)}; use a smaller --num-test."
            )
        return {"test": rows[: sizes["test"]], "train": rows[sizes["test"] :]}
    if not arguments.name:
        raise ValueError(
            f"--name is missing, but {kind} needs names of generators or environments; pass --name A,B."
        )
    if kind == "seeds":
        seeds = iter(seed_rows(names, arguments.seed, sum(sizes.values())))
        return {split: list(islice(seeds, size)) for split, size in sizes.items()}
    # Puzzle i of a generator is made from the seed + i; the splits are far apart.
    first = {"train": arguments.seed, "test": arguments.seed + 10**9}
    return {s: list(reasoning_gym_rows(names, options, first[s], size)) for s, size in sizes.items()}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("kind", choices=("arithmetic", "harbor", "reasoning-gym", "seeds", "verifiers"))
    parser.add_argument("--name", default="", help="generators or env_ids, separated by commas")
    parser.add_argument("--options", default="{}", help="JSON object")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-train", type=int, default=4096)
    parser.add_argument("--num-test", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        splits = make_tasks(arguments)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        path = arguments.out / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
