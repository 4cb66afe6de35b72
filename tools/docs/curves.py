"""Learning curves of the toy runs: stored in docs/pictures/curves.json, and drawn from it.

python tools/docs/curves.py runs/toy-ppo runs/toy-grpo      store their curves, under the names of the runs
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from rl.run_directory.metric_log import FILE_NAME, STEP, read_records  # noqa: E402
from tools.docs.svg import Drawing  # noqa: E402

STORED = ROOT / "docs" / "pictures" / "curves.json"
ACCURACY, SCORE, LOSS = "val-core/addition/acc/mean@1", "critic/score/mean", "sft/loss"
NAMES = {
    ACCURACY: "held-out accuracy, greedy",
    SCORE: "mean score of the step's samples",
    LOSS: "loss per token",
}


def read_run(run: Path) -> dict[str, list[list[float]]]:
    """Return metric -> [step, value] pairs of a run, for the metrics that a curve shows."""
    records = read_records(run / FILE_NAME)
    return {
        metric: [[r[STEP], round(r[metric], 4)] for r in records if metric in r]
        for metric in NAMES
        if any(metric in r for r in records)
    }


def stored() -> dict[str, dict]:
    return json.loads(STORED.read_text(encoding="utf-8"))


def draw(name: str, curve: dict[str, list[list[float]]]) -> str:
    """Return the SVG of a run's curves over its steps."""
    width, height, left, bottom, top, right = 640, 300, 52, 46, 34, 16
    drawing = Drawing(width, height, f"Learning curve of {name}")
    values = [value for points in curve.values() for _, value in points]
    steps = max(step for points in curve.values() for step, _ in points)
    high = math.ceil(max(values))

    def place(step: float, value: float) -> tuple[float, float]:
        across, up = (width - left - right) / steps, (height - top - bottom) / high
        return left + step * across, height - bottom - value * up

    for part in range(6):
        value = high * part / 5
        drawing.path([place(0, value), place(steps, value)], "grid")
        drawing.text(left - 6, place(0, value)[1] + 4, f"{value:.1f}", "small", "end")
        step = round(steps * part / 5)
        drawing.text(place(step, 0)[0], height - bottom + 16, str(step), "small")
    drawing.text((left + width - right) / 2, height - 10, "step", "small")
    at = left
    for metric, points in curve.items():
        main = metric != SCORE
        classes = "line" if main else "second"
        drawing.path([place(*point) for point in points], classes)
        if main and len(points) < 40:
            for x, y in (place(*point) for point in points):
                drawing.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--line)"/>')
        drawing.path([(at, 16), (at + 26, 16)], classes)
        drawing.text(at + 32, 20, NAMES[metric], "small", "start")
        at += 250
    return drawing.svg()


def main(runs: list[str]) -> None:
    curves = stored() if STORED.exists() else {}
    for run in map(Path, runs):
        curves[run.name.removeprefix("toy-").removeprefix("quickstart-")] = read_run(run)
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(curves[name])}" for name in sorted(curves))
    STORED.write_text("{\n" + text + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
