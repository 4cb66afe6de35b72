"""Pictures of how Lockstep works: rooms and their imports, a step, who holds what, a refit by its plan."""

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from rl.models import architecture  # noqa: E402
from rl.models.placement import RolloutPlacement, TrainingPlacement, training_ranges  # noqa: E402
from rl.refit.plan import Routing  # noqa: E402
from tools.docs.svg import ARROW, Drawing  # noqa: E402

Node = tuple[str, int]
"""A room, or the place where the arrow `name` crosses a floor: (name, floor)."""


# The house --------------------------------------------------------------------------------------------------


def floors() -> list[list[str]]:
    """Return the rooms of each floor, as docs/architecture.md shows them (tests/unit/test_arrows.py)."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return [line.split() for line in text.partition("## Packages")[2].split("```")[1].strip().splitlines()]


def imports(room: str) -> set[str]:
    """Return the other rooms that the files of a room import, also inside of functions."""
    found = set()
    for file in (ROOT / "rl" / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            found |= {module.split(".")[1] for module in modules if module.startswith("rl.")}
    return found - {room}


def needed(arrows: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield the arrows that do not follow from others: a -> c follows from a -> b and b -> c."""
    reached: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in reached:
            reached[room] = arrows[room].union(*(reach(other) for other in arrows[room]))
        return reached[room]

    for room in arrows:
        for other in sorted(arrows[room]):
            if not any(other in reach(between) for between in arrows[room] - {other}):
                yield room, other


def house() -> str:
    """Return the rooms by floor with their imports; a room is drawn below those that import it."""
    rows = floors()
    floor_of = {room: number for number, rooms in enumerate(rows) for room in rooms}
    arrows = {room: imports(room) & floor_of.keys() for room in floor_of}
    total, shown = sum(map(len, arrows.values())), list(needed(arrows))
    lines = [
        [(a, floor_of[a]), *((f"{a} {b}", n) for n in range(floor_of[a] + 1, floor_of[b])), (b, floor_of[b])]
        for a, b in shown
    ]
    order: list[list[Node]] = [[(room, n) for room in rooms] for n, rooms in enumerate(rows)]
    near: dict[Node, list[Node]] = defaultdict(list)
    for line in lines:
        for node in line[1:-1]:
            order[node[1]].append(node)
        for upper, lower in zip(line, line[1:]):
            near[upper].append(lower)
            near[lower].append(upper)
    size = {node: 8 * len(node[0]) + 22 if node[0] in floor_of else 12 for row in order for node in row}
    at = spread(order, near, size)
    width, gap, top = max(at[row[-1]] + size[row[-1]] / 2 for row in order) + 12, 76, 40
    title = f"Packages of rl/: {len(floor_of)} packages, {total} imports, none upward"
    drawing = Drawing(width, top + gap * len(rows) - 24, title)
    drawing.text(
        12,
        20,
        f"{title}. {total - len(shown)} arrows that follow from others are left out.",
        "small",
        "start",
    )
    for line in lines:
        points = [(at[node], top + gap * node[1] + 15) for node in line]
        points[0], points[-1] = (points[0][0], points[0][1] + 15), (points[-1][0], points[-1][1] - 16)
        drawing.curve(points)
    for row in order:
        for node in row:
            if node[0] in floor_of:
                drawing.box(at[node] - size[node] / 2, top + gap * node[1], size[node], 30, node[0])
    return drawing.svg()


def spread(
    order: list[list[Node]], near: dict[Node, list[Node]], size: dict[Node, float]
) -> dict[Node, float]:
    """Return x of each node: near the mean of its neighbours, without overlaps. Sorts the rows of `order`."""
    at = {node: 90.0 * i for row in order for i, node in enumerate(row)}
    for _ in range(60):
        for row in [*order, *reversed(order)]:
            wish = {n: sum(at[other] for other in near[n]) / len(near[n]) if near[n] else at[n] for n in row}
            row.sort(key=lambda n: (round(wish[n], 3), n))
            edge = float("-inf")
            for node in row:
                at[node] = max(wish[node], edge + size[node] / 2)
                edge = at[node] + size[node] / 2 + 14
            shift = sum(wish[n] - at[n] for n in row) / len(row)
            for node in row:
                at[node] += shift
    left = min(at[node] - size[node] / 2 for node in at) - 12
    return {node: x - left for node, x in at.items()}


# One step ---------------------------------------------------------------------------------------------------

STEP = (
    ("refit", {"engine": "receives", "trainer": "sends"}, "weights, if the policy changed"),
    ("generate", {"engine": "samples"}, "token ids, their log-probs"),
    ("score", {"workers": "reward function"}, "a score per sample"),
    ("log_probs", {"trainer": "forward passes"}, "log-probs of old, and reference policy"),
    ("advantages", {"every rank": "pure functions"}, "an advantage, per token"),
    ("update", {"trainer": "forward, backward"}, "new weights, version + 1"),
)
"""Phases of a step of GRPO: name, what each actor does, what the phase leaves."""
ACTORS = ("engine", "workers", "trainer", "every rank")


def step() -> str:
    """Return the phases of a step from left to right, with a row for each part of a rank."""
    width, row, left, top = 158, 62, 118, 74
    drawing = Drawing(left + width * len(STEP) + 10, top + row * len(ACTORS) + 76, "One training step")
    drawing.text(10, 22, "One step of GRPO on every rank: collect (left half), then learn.", "bold", "start")
    for i, actor in enumerate(ACTORS):
        y = top + row * i
        drawing.text(10, y + 26, actor, "", "start")
        drawing.path([(left, y + row - 6), (left + width * len(STEP), y + row - 6)], "grid")
    for i, (name, actions, leaves) in enumerate(STEP):
        x = left + width * i
        drawing.text(x + width / 2, 50, name, "bold")
        rows = [ACTORS.index(actor) for actor in actions]
        for at, action in zip(rows, actions.values()):
            drawing.box(x + 6, top + row * at, width - 14, 44, action, fill="var(--held)")
        if len(rows) > 1:
            drawing.path([(x + 74, top + row * max(rows)), (x + 74, top + row * min(rows) + 46)], arrow=True)
        base = top + row * len(ACTORS)
        for number, part in enumerate(leaves.split(", ")):
            drawing.text(x + width / 2, base + 14 + 15 * number, part, "small")
        if i:
            drawing.path([(x - 8, 46), (x + 10, 46)], arrow=True)
    y = top + row * len(ACTORS) + 52
    end = left + width * len(STEP) - 60
    drawing.path([(end, y - 14), (end, y), (left + 60, y), (left + 60, y - 14)], arrow=True)
    drawing.text((left + end) / 2, y + 16, "the next step begins with a refit of the new weights", "small")
    return drawing.svg()


# Who holds what ---------------------------------------------------------------------------------------------

HELD = {
    "trainer, critic: weights": "GHGG",
    "trainer, critic: Adam and master weights": "HHGG",
    "trainer, critic: gradients": "--RG",
    "reference policy: weights": "HHHH",
    "engine: weights": "GG--",
    "engine: KV cache": "-G--",
    "batch: token ids, log-probs, advantages": "HHHH",
}
"""Where a part of a run is, by phase of HOLDERS: a letter of PLACES."""
HOLDERS = ("refit", "generate", "log_probs", "update")
PLACES = {
    "G": ("GPU", "var(--held)"),
    "H": ("host", "var(--host)"),
    "-": ("", "none"),
    "R": ("GPU: reference", "var(--held)"),
}
"""Letter -> label and colour."""


def holders() -> str:
    """Return a table of what one GPU holds in each phase with training.offload=all, the default on CUDA."""
    left, cell, row, top = 300, 112, 38, 74
    drawing = Drawing(left + cell * len(HOLDERS) + 12, top + row * len(HELD) + 50, "Who holds what")
    drawing.text(10, 22, "The memory of one GPU over a step (training.offload=all)", "bold", "start")
    for i, phase in enumerate(HOLDERS):
        drawing.text(left + cell * (i + 0.5), top - 12, phase, "bold")
    for j, (name, places) in enumerate(HELD.items()):
        drawing.text(10, top + row * j + 22, name, "", "start")
        for i, place in enumerate(places):
            label, fill = PLACES[place]
            drawing.rect(left + cell * i + 3, top + row * j + 3, cell - 6, row - 6, fill)
            drawing.text(left + cell * (i + 0.5), top + row * j + 23, label, "small")
    notes = (
        "Empty: released. The reference policy's weights are copied into the gradient buffers for its pass."
    )
    drawing.text(10, top + row * len(HELD) + 28, notes, "small", "start")
    return drawing.svg()


# A refit ----------------------------------------------------------------------------------------------------

MODEL, TP, PP, ROLLOUT_TP, WORLD = "qwen2.5-0.5b", 2, 2, 2, 4


def traffic() -> dict[tuple[int, int], int]:
    """Return (sender, receiver) -> bytes of a refit by the plan of a run, in bfloat16."""
    hf = json.loads((ROOT / "configs" / "models" / MODEL / "config.json").read_text(encoding="utf-8"))
    weights, layers = architecture(hf).weights(hf), hf["num_hidden_layers"]
    training, rollout = TrainingPlacement(WORLD, TP, PP, layers), RolloutPlacement(WORLD, ROLLOUT_TP, layers)
    routing = Routing(weights, training, rollout, node_of=lambda rank: 0, itemsize=2)
    moved: dict[tuple[int, int], int] = defaultdict(int)
    for route in routing.routes:
        for flow in routing.flows[route]:
            parts = routing._bytes_by_tp_rank(route, flow, 1)[flow.stream.needer_tp_ranks]
            for giver, needer, size in zip(flow.stream.givers, flow.stream.needers, parts):
                moved[int(giver), int(needer)] += int(size)
    return dict(moved)


def refit() -> str:
    """Return who sends how much to whom in a refit on four ranks, with the bytes of its plan."""
    hf = json.loads((ROOT / "configs" / "models" / MODEL / "config.json").read_text(encoding="utf-8"))
    ranges = training_ranges(hf["num_hidden_layers"], PP)
    column, box, top, low = 200, 176, 66, 300
    drawing = Drawing(column * WORLD + 20, low + 120, "A refit")
    drawing.text(
        10,
        22,
        f"A refit of {MODEL}, bfloat16: training tp {TP} pp {PP} -> two engines of tp {ROLLOUT_TP}",
        "bold",
        "start",
    )
    drawing.text(
        10,
        44,
        "Solid: copied within the rank. Dashed: sent to another rank. Numbers are MiB of the plan.",
        "small",
        "start",
    )
    place = {}
    for rank in range(WORLD):
        x = 20 + column * rank
        first, last = ranges[rank // (WORLD // PP)]
        drawing.box(
            x, top, box, 50, f"rank {rank} trains", f"layers {first} to {last - 1}, half {rank % TP} of each"
        )
        drawing.box(
            x,
            low,
            box,
            50,
            f"rank {rank} generates",
            f"engine {rank // ROLLOUT_TP}: all layers, half {rank % ROLLOUT_TP}",
        )
        place[rank] = x
    moved = traffic()
    for (giver, needer), size in sorted(moved.items()):
        x0 = place[giver] + box * (0.2 + 0.2 * needer)
        x1 = place[needer] + box * (0.2 + 0.2 * giver)
        dashes = "" if giver == needer else 'stroke-dasharray="5 4"'
        start, end = f"{x0:.1f},{top + 50}", f"{x1:.1f},{low - 4}"
        bends = f"{x0:.1f},{top + 130} {x1:.1f},{low - 90}"
        drawing.add(f'<path d="M{start} C{bends} {end}" class="ink" {dashes}{ARROW}/>')
        drawing.text(x1 + 3, low - 14 - 13 * (giver % 2), f"{size / 2**20:.0f}", "small", "start")
    received = {rank: sum(size for (a, b), size in moved.items() if b == rank != a) for rank in range(WORLD)}
    whole = {rank: sum(size for (a, b), size in moved.items() if b == rank) for rank in range(WORLD)}
    for rank in range(WORLD):
        text = f"needs {whole[rank] / 2**20:.0f}, receives {received[rank] / 2**20:.0f} MiB"
        drawing.text(place[rank] + box / 2, low + 72, text, "small")
    drawing.text(
        10,
        low + 104,
        "Gathering every weight on every rank would send each rank the whole model.",
        "small",
        "start",
    )
    return drawing.svg()


PICTURES = {"house": house, "step": step, "holders": holders, "refit": refit}
