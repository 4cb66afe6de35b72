"""The picture of the packages and their imports."""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.docs.svg import Drawing  # noqa: E402

Node = tuple[str, int]
"""A room, or the place where the arrow `name` crosses a floor: (name, floor)."""


def floors() -> list[list[str]]:
    """Return the rooms of each floor from the top to the ground, as docs/architecture.md shows them."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return [line.split() for line in text.partition("## Packages")[2].split("```")[1].strip().splitlines()]


def imports(room: str) -> dict[str, set[str]]:
    """Return the other rooms that a room imports, also inside of functions, each with the importing files."""
    found = defaultdict(set)
    for file in (ROOT / "rl" / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                if module.startswith("rl.") and (other := module.split(".")[1]) != room:
                    found[other].add(str(file.relative_to(ROOT)))
    return dict(found)


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
    """Return the rooms by floor with their imports; a room is drawn below the rooms that import it."""
    rows = floors()
    floor_of = {room: number for number, rooms in enumerate(rows) for room in rooms}
    arrows = {room: imports(room).keys() & floor_of.keys() for room in floor_of}
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
    order: list[list[Node]], near: dict[Node, list[Node]], size: Mapping[Node, float]
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
