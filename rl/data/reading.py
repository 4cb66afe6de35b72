"""Rows of data files: parquet, JSONL, and Arrow as the `datasets` library writes it.

Every rank reads the files itself, in memory: a few thousand rows take seconds, and there is no cache on disk for thousands
of ranks to lock and overwrite at once. Whatever is wrong with a file is a ValueError that names it, and the row if there is
one.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Columns = Mapping[str, str]
"""A column that a file must have -> what the user can do about it if it lacks it: `name the column ... in data.x_key`."""


@dataclass(frozen=True)
class Row:
    """A row as it stands in a file, and where, for error messages."""

    values: dict[str, Any]
    path: Path
    number: int
    """From 1, in this file; the line number in a JSONL file."""
    source: int
    """Index of the file among those that are read."""

    @property
    def place(self) -> str:
        return f"{self.path}, row {self.number}"

    @property
    def file_name(self) -> str:
        """The file's name without its ending; a directory has none."""
        return self.path.stem if self.path.suffix in _READERS else self.path.name


def read_rows(
    files: Sequence[str | Path], *, required: Columns, optional: Sequence[str] = (), max_rows: int = 0
) -> list[Row]:
    """The rows of `files`, one file after the other; the same list on every rank that reads the same files.

    files: `.parquet`, `.jsonl`, `.arrow`, or a directory that `Dataset.save_to_disk` of the datasets library wrote.
    required: columns that each file must have.
    optional: columns that are read where they exist. No other is read.
    max_rows: stop after so many rows. 0: read all.

    Raises ValueError for no file, a missing, unreadable or empty one, one of another kind, and a missing column.
    """
    paths = [Path(file) for file in files]
    for path in paths:
        _check_kind(path)
    rows: list[Row] = []
    wanted = {*required, *optional}
    for source, path in enumerate(paths):
        num_before = len(rows)
        for number, values in _READERS.get(path.suffix, _read_arrow)(path, wanted, required):
            if max_rows and len(rows) == max_rows:
                return rows
            rows.append(Row(values, path, number, source))
        if len(rows) == num_before:
            raise ValueError(f"data file {path} is empty: it has no rows.")
    if not rows:
        raise ValueError(
            "no data files: data.train must name at least one .parquet or .jsonl file, or data in Arrow form."
        )
    return rows


def describe(value: Any) -> str:
    """A value in an error message: its type and the beginning of what it holds."""
    if value is None:
        return "missing"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def first_line(error: Exception) -> str:
    """An error's own message, without the lines of detail that libraries append."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _check_kind(path: Path) -> None:
    if path.is_dir():
        if (splits_file := path / "dataset_dict.json").is_file():
            splits = json.loads(splits_file.read_text()).get("splits", [])
            raise ValueError(
                f"data file {path} is a DatasetDict with the splits {', '.join(splits) or '(none)'}: name the directory "
                f"of one of them, such as {path / (splits[0] if splits else 'train')}."
            )
        if not (path / "state.json").is_file():
            raise ValueError(
                f"data file {path} is a directory without state.json, so not one that datasets' save_to_disk wrote: "
                "name the files in it instead."
            )
    elif not path.is_file():
        raise ValueError(f"data file {path} does not exist (working directory {Path.cwd()}).")
    elif path.suffix not in _READERS:
        raise ValueError(
            f"data file {path} ends in {path.suffix!r}: it must be .parquet or .jsonl, or in Arrow form: .arrow or a "
            "directory that datasets' save_to_disk wrote."
        )


def _read_parquet(path: Path, wanted: set[str], required: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 1, values) of a parquet file."""
    try:
        # By batches: a nested column of more than 2 GiB cannot be read at once. Not pq.read_table: it would take a
        # directory called a=b for a partition and add a column.
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            _require_columns(required, found, f"data file {path}")
            number = 0
            for batch in file.iter_batches(columns=[name for name in found if name in wanted]):
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"data file {path} cannot be read as parquet: {first_line(error)}") from error


def _read_jsonl(path: Path, wanted: set[str], required: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, values) of a JSONL file; empty lines are passed over.

    Line by line with `json`, not with Arrow's reader, which makes timestamps of strings that look like one and
    wants the same type in every row.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data file {path} cannot be read as JSONL: {first_line(error)}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, row {number}: not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}, row {number}: must be a JSON object, it is {describe(values)}.")
        _require_columns(required, list(values), f"{path}, row {number}")
        yield number, {name: value for name, value in values.items() if name in wanted}


def _read_arrow(path: Path, wanted: set[str], required: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 1, values) of an Arrow file or a directory of `save_to_disk`.

    By the datasets library and not by Arrow itself: its features say how to decode a column, and the rows of a selection
    are found through its index.
    """
    import datasets  # here, because its import takes a second or two and few runs need it

    if path.is_dir() and not any(path.glob("*.arrow")):
        return  # an empty data set is saved without a file, which load_from_disk answers with an IndexError
    try:
        opened = (
            datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
        )
    except Exception as error:  # whatever the library stumbles over, the user needs to know in which file
        raise ValueError(f"data file {path} cannot be read as Arrow: {first_line(error)}") from error
    found = opened.column_names
    _require_columns(required, found, f"data file {path}")
    # A saved format (torch, numpy) would give tensors.
    selected = opened.with_format(None).select_columns([name for name in found if name in wanted])
    number = 0
    for batch in selected.iter(batch_size=1000):
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield number, dict(zip(batch, values, strict=True))


def _require_columns(required: Columns, found: list[str], place: str) -> None:
    for name, way_out in required.items():
        if name not in found:
            raise ValueError(
                f"{place}: there is no column {name!r}, only {', '.join(found) or 'none at all'}: {way_out}."
            )


_READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".arrow": _read_arrow}
