"""The page of `lockstep report`: one HTML file with the data of runs and the library that draws them.

The data are JSON and arrays in gzip, as base64 in script elements, which page.js reads. Scores and lengths of
all stored samples are in the page. Their tokens are the largest part; if they exceed the limit, groups are
left out evenly over the steps.
"""

import base64
import gzip
import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.options import parse_yaml
from rl.run_directory.bad_entries import read_each
from rl.run_directory.metric_log import STEP, number_of
from rl.run_directory.named_metrics import first_curves
from rl.run_directory.record import RecordedStart, starts_of
from rl.run_directory.rollout_files import GIVEN_BY, TOKENS_FILE, read, stored_steps
from rl.run_directory.status import read_object

HERE = Path(__file__).parent
TOKEN_BYTES = 6
"""Estimated size of a token in the page, in bytes."""
GROUP_BYTES = 600
"""Estimated size of a group besides its tokens, in bytes."""
SCALARS = ("step", "group", "row", "data_source", "score", "length")
CONTENTS = (
    "group",
    "sample",
    "row",
    "prompt",
    "ground_truth",
    "score",
    "reward",
    "score_details",
    "truncated",
    "response_ids",
    "mask",
    "turns",
    "rollout_logprobs",
    "old_logprobs",
    "advantages",
    "weight_versions",
)


class PageData:
    """The data of the page by name."""

    def __init__(self) -> None:
        self.packed: dict[str, str] = {}

    def add(self, name: str, content: bytes | str | np.ndarray) -> None:
        raw = content.encode() if isinstance(content, str) else bytes(content)
        self.packed[name] = base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()

    def add_json(self, name: str, value: Any) -> None:
        self.add(name, json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


def write_page(
    runs: dict[Path, list[dict]], summaries: dict[Path, dict[str, str]], path: Path, *, sample_mib: float
) -> None:
    """Write the page of these runs, given their metrics and the facts of the summary.

    sample_mib: limit of the tokens of all runs. Raises ValueError if the library is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ValueError("the page needs plotly: pip install 'lockstep-rl[report]'.") from None
    parts, names = PageData(), _names(list(runs))
    parts.add("plotly", get_plotlyjs())
    shown = []
    for number, (run_dir, records) in enumerate(runs.items()):
        configs = _configs(run_dir)
        run: dict[str, Any] = {
            "name": names[run_dir],
            "summary": summaries[run_dir],
            "metrics": _metrics(records),
            "config": [*configs.values()][-1] if configs else {},
            "events": _events(run_dir, configs),
            "samples": None,
            "tokens": [],
        }
        steps = stored_steps(run_dir)
        readable = read_each(steps.values(), lambda path: read(path, list(CONTENTS)).num_rows)
        if readable and read_each([run_dir / TOKENS_FILE], _token_texts):
            known = {step: path for step, path in steps.items() if path in readable}
            limit = sample_mib * 2**20 / len(runs)
            run["samples"], run["tokens"] = _samples(parts, number, run_dir, known, limit)
        shown.append(run)
    link = re.compile(r"\[[^]]*\]\(([^)#]*)[^)]*\)")  # of a page of docs/
    curves = {
        name: {key: link.sub(r"docs/\1", entry.get(key, "")) for key in ("plain", "bad")}
        for name, entry in first_curves().items()
    }
    parts.add_json("main", {"sources": GIVEN_BY, "curves": curves, "runs": shown})
    title = html.escape(" and ".join(names.values()) if len(names) < 4 else f"{len(names)} runs")
    scripts = "\n".join(
        f'<script type="text/plain" id="{name}">{text}</script>' for name, text in parts.packed.items()
    )
    texts = {"STYLE": (HERE / "page.css").read_text(), "SCRIPT": (HERE / "page.js").read_text()}
    page = (HERE / "page.html").read_text()
    for name, text in {"TITLE": title, **texts, "PARTS": scripts}.items():
        page = page.replace(f"@{name}@", text)
    path.write_text(page, encoding="utf-8")


def _names(run_dirs: list[Path]) -> dict[Path, str]:
    """Return the fewest last parts of each path that tell the runs apart."""
    parts = [path.resolve().parts for path in run_dirs]
    length = 1
    while len({own[-length:] for own in parts}) < len(set(parts)):
        length += 1
    return {path: "/".join(own[-length:]) for path, own in zip(run_dirs, parts)}


def _metrics(records: list[dict]) -> dict[str, Any]:
    names = sorted({name for record in records for name in record} - {STEP, "time"})

    def rounded(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    return {
        "steps": [record[STEP] for record in records],
        "time": [record.get("time", 0) for record in records],
        "columns": {name: [rounded(record.get(name)) for record in records] for name in names},
    }


# Config and events ----------------------------------------------------------------------------------------


def _configs(run_dir: Path) -> dict[RecordedStart, dict[str, str]]:
    """Return the flat config of each start of the run, oldest first."""
    starts = {start.config: start for start in starts_of(run_dir)}
    found = read_each(starts, lambda path: dict(_flat(parse_yaml(path.read_text(), path.name))))
    return {starts[path]: config for path, config in found.items()}


def _token_texts(path: Path) -> list[str]:
    texts = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(texts, list):
        raise ValueError("it is not a list of texts")
    return texts


def _flat(values: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _events(run_dir: Path, configs: dict[RecordedStart, dict[str, str]]) -> list[dict[str, Any]]:
    """Return starts, resumes, faults and the end of a run, by the times in its files; '-' for unknown ones.

    Dates of files are not read, because copying a run changes them.
    """
    found: list[tuple[float | None, float | None, str, str]] = []
    before: dict[str, str] = {}
    for start, config in configs.items():
        if not start.environment.is_file():
            continue
        facts, step = read_object(start.environment), start.after_step
        changed = [key for key in {**before, **config} if before and before.get(key) != config.get(key)]
        world_size = facts.get("world_size")
        texts = [f"{world_size} rank{'s' if world_size != 1 else ''}, {facts.get('host')}"]
        texts += [f"{key}: {before.get(key, '-')} -> {config.get(key, '-')}" for key in changed]
        found.append((number_of(facts.get("time")), step, "resume" if step else "start", "; ".join(texts)))
        before = config
    for path in sorted((run_dir / "errors").glob("*.txt")):
        lines = path.read_text(errors="replace").strip().splitlines()
        found.append((_reported_at(lines), None, "fault", f"{path.name}: {lines[-1] if lines else ''}"))
    for path in sorted((run_dir / "stacks").glob("*.txt")):
        if lines := path.read_text(errors="replace").splitlines():
            found.append((_reported_at(lines), None, "stacks", f"stacks of a rank in stacks/{path.name}"))
    status_file = run_dir / "status.json"
    if status_file.is_file():
        status = {"time": None, "state": "unknown"} | read_object(status_file)
        where = f"job {status['job']}" if status.get("job") else ""
        text = "; ".join(filter(None, (str(status.get("reason") or ""), where)))
        found.append((number_of(status["time"]), number_of(status.get("step")), str(status["state"]), text))
    places, last = [], 0.0
    for when, *_ in found:
        last = last if when is None else when
        places.append(last)  # an event without a time follows the one before it
    in_order = [event for _, event in sorted(zip(places, found), key=lambda pair: pair[0])]
    return [
        {"time": _utc(when), "step": step, "kind": kind, "text": text} for when, step, kind, text in in_order
    ]


def _utc(when: float | None) -> str:
    return "-" if when is None else f"{datetime.fromtimestamp(when, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _reported_at(lines: list[str]) -> float | None:
    """Return the Unix time at the end of a report's first line, None if there is none."""
    try:
        return datetime.fromisoformat(lines[0].rpartition(" at ")[2]).timestamp()
    except (IndexError, ValueError):
        return None


# Samples --------------------------------------------------------------------------------------------------


def _samples(
    parts: PageData, run: int, run_dir: Path, files: dict[int, Path], limit: float
) -> tuple[dict[str, Any], list[str]]:
    """Add the stored samples of a run; return their description and the texts of the tokens that occur."""
    import pyarrow as pa

    tables = [read(path, list(SCALARS)) for path in files.values()]
    kind = (tables[0].schema.metadata or {}).get(b"rollouts", b"all").decode()
    table = pa.concat_tables(tables).combine_chunks()
    sources = sorted({source or "" for source in table["data_source"].unique().to_pylist()})
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in SCALARS}
    places = {source: place for place, source in enumerate(sources)}
    own = np.array([places[source or ""] for source in columns.pop("data_source")], np.uint8)
    types = {"step": np.int32, "group": np.int32, "row": np.uint8, "score": np.float32, "length": np.int32}
    for name, dtype in types.items():
        parts.add(f"{name}.{run}", np.ascontiguousarray(columns[name], dtype).tobytes())
    parts.add(f"source.{run}", own.tobytes())
    images = {step: _images(path) for step, path in files.items()}
    kept = _kept_groups(columns["step"], columns["group"], columns["length"], images, limit)
    vocabulary: dict[int, int] = {}
    for step, groups in kept.items():
        rows = [row for row in read(files[step], list(CONTENTS)).to_pylist() if row["group"] in groups]
        rows = [row | {"images": images[step].get(row["group"], [])} for row in rows]
        parts.add_json(f"tokens.{run}.{step}", _groups(rows, vocabulary))
    texts = _token_texts(run_dir / TOKENS_FILE)
    tokens = [texts[i] if i < len(texts) else f"<{i}>" for i in vocabulary]
    stored = {str(step): sorted(groups) for step, groups in kept.items()}
    return {"kind": kind, "sources": sources, "stored": stored}, tokens


def _images(path: Path) -> dict[int, list[str]]:
    """Return the images of each group's prompt, as base64; empty for a run without images."""
    import pyarrow.parquet as pq

    if "images" not in pq.read_schema(path).names:
        return {}
    rows = read(path, ["group", "images"]).to_pylist()
    return {
        row["group"]: [base64.b64encode(file).decode() for file in row["images"]]
        for row in rows
        if row["images"]
    }


def _kept_groups(
    steps: np.ndarray,
    groups: np.ndarray,
    lengths: np.ndarray,
    images: dict[int, dict[int, list[str]]],
    limit: float,
) -> dict[int, set[int]]:
    """Return the groups of each step with their contents in the page: evenly spaced ones within the limit."""
    sizes: dict[tuple[int, int], int] = defaultdict(lambda: GROUP_BYTES)
    for step, group, length in zip(steps.tolist(), groups.tolist(), lengths.tolist()):
        sizes[step, group] += TOKEN_BYTES * length
    for step, found in images.items():
        for group, files in found.items():
            sizes[step, group] += sum(map(len, files))
    owners = list(sizes)
    share = min(1.0, limit / max(1, sum(sizes.values())))
    chosen = {owners[math.floor(i / share)] for i in range(math.floor(len(owners) * share + 1e-9))}
    kept: dict[int, set[int]] = defaultdict(set)
    for step, group in sorted(chosen):
        kept[step].add(group)
    return dict(kept)


def _groups(rows: list[dict[str, Any]], vocabulary: dict[int, int]) -> list[dict[str, Any]]:
    """Return rows of a step as groups with compact samples; token ids are places in the vocabulary."""
    groups: dict[int, dict[str, Any]] = {}
    for row in rows:
        first = {"group": row["group"], "prompt": row["prompt"], "truth": row["ground_truth"], "samples": []}
        first |= {"images": row["images"]} if row["images"] else {}
        group = groups.setdefault(row["group"], first)
        ids = [vocabulary.setdefault(i, len(vocabulary)) for i in row["response_ids"]]
        sample = {name: row[name] for name in ("sample", "row", "truncated")}
        sample |= {name: _finite(row[name]) for name in ("score", "reward")}
        sample |= {"ids": ids, "details": json.loads(row["score_details"])}
        engine, trainer = row["rollout_logprobs"], row["old_logprobs"]
        if engine or trainer:
            sample["probability"] = [round(100 * math.exp(min(0.0, value))) for value in trainer or engine]
        if engine and trainer:
            sample["gap"] = _short([_significant(a - b) for a, b in zip(trainer, engine)])
        if row["advantages"]:
            sample["advantage"] = _short([_significant(value) for value in row["advantages"]])
        if row["turns"]:
            sample["turns"] = row["turns"]
        if row["mask"] and 0 in row["mask"]:
            sample["mask"] = row["mask"]
        if versions := row["weight_versions"]:
            low, high = min(versions), max(versions)
            sample["versions"] = f"weights {low}" if low == high else f"weights {low} to {high}"
        group["samples"].append(sample)
    return list(groups.values())


def _significant(value: float) -> float:
    """Return two significant digits, or 0 for a difference that only rounding makes."""
    return float(f"{value:.2g}") if abs(value) >= 1e-4 else 0


def _short(values: list[float]) -> float | list[float]:
    """Return one number for equal ones."""
    return values[0] if len(set(values)) == 1 else values


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
