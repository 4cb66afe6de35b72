"""Rows of data files: parquet, JSONL, and the Arrow files of the `datasets` library.

Every rank reads the files into its own memory. A few thousand rows take seconds, and thousands of ranks need
not share a disk cache. Every error is a ValueError that names the file and, if possible, the row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Columns = Mapping[str, str]
"""Required column -> remedy for the error if it is missing, such as `name the column ... in data.x_key`."""


@dataclass(frozen=True)
class Row:
    """A row of a file, and its position for error messages."""

    values: dict[str, Any]
    path: Path
    number: int
    """Position in the file, from 1; the line number in a JSONL file."""
    source: int
    """Index of the file in the list of files."""

    @property
    def place(self) -> str:
        return f"{self.path}, row {self.number}"

    @property
    def file_name(self) -> str:
        """Name of the file without its extension, or of the directory."""
        return self.path.stem if self.path.suffix in _READERS else self.path.name


def read_rows(
    files: Sequence[str | Path], *, required: Columns, optional: Sequence[str] = (), max_rows: int = 0
) -> list[Row]:
    """Return the rows of `files` in order.

    files: `.parquet`, `.jsonl`, `.arrow`, or a directory written by `Dataset.save_to_disk` of the datasets
    library. required: columns that each file must have. optional: columns that are read if they exist. Other
    columns are not read. max_rows: maximum number of rows; 0 reads all.

    Raises ValueError for an empty list, a missing, unreadable, empty or unsupported file, and a missing
    column.
    """
    paths = [Path(file) for file in files]
    for path in paths:
        _check_kind(path)
    rows: list[Row] = []
    names = {*required, *optional}
    for source, path in enumerate(paths):
        num_before = len(rows)
        for number, values in _READERS.get(path.suffix, _read_arrow)(path, names, required):
            if max_rows and len(rows) == max_rows:
                return rows
            rows.append(Row(values, path, number, source))
        if len(rows) == num_before:
            raise ValueError(f"data file {path} is empty: it has no rows.")
    if not rows:
        raise ValueError(
            "data.train is empty: name at least one .parquet, .jsonl or .arrow file or directory."
        )
    return rows


def describe(value: Any) -> str:
    """Return the type of a value and the beginning of its repr, for error messages."""
    if value is None:
        return "missing"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the details that libraries append."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _check_kind(path: Path) -> None:
    if path.is_dir():
        if (splits_file := path / "dataset_dict.json").is_file():
            splits = json.loads(splits_file.read_text()).get("splits", [])
            raise ValueError(
                f"data file {path} is a DatasetDict with the splits {', '.join(splits) or '(none)'}: name "
                f"the directory of one of them, such as {path / (splits[0] if splits else 'train')}."
            )
        if not (path / "state.json").is_file():
            raise ValueError(
                f"data file {path} is a directory without state.json, so save_to_disk of datasets did not "
                "write it: name the files in it instead."
            )
    elif not path.is_file():
        raise ValueError(f"data file {path} does not exist (working directory {Path.cwd()}).")
    elif path.suffix not in _READERS:
        raise ValueError(
            f"data file {path} ends in {path.suffix!r}: it must be .parquet, .jsonl, .arrow, or a directory "
            "that save_to_disk of datasets wrote."
        )


def _read_parquet(path: Path, names: set[str], required: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 1, values) of a parquet file."""
    try:
        # In batches, because a nested column of more than 2 GiB cannot be read at once. Not by pq.read_table,
        # which takes a directory named a=b for a partition and adds a column.
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            _require_columns(required, found, f"data file {path}")
            batches = file.iter_batches(columns=[name for name in found if name in names])
            yield from enumerate((values for batch in batches for values in batch.to_pylist()), start=1)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"data file {path} cannot be read as parquet: {first_line(error)}") from error


def _read_jsonl(path: Path, names: set[str], required: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, values) of a JSONL file, skipping empty lines.

    Lines are parsed with `json`: Arrow's reader converts strings that look like timestamps and requires the
    same type in every row.
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
            raise ValueError(f"{path}, row {number}: must be a JSON object, not {describe(values)}.")
        _require_columns(required, list(values), f"{path}, row {number}")
        yield number, {name: value for name, value in values.items() if name in names}


def _read_arrow(path: Path, names: set[str], required: Columns) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 1, values) of an Arrow file or a directory of `save_to_disk`.

    The datasets library is needed because its features decode columns and its index maps the rows of a
    selection.
    """
    import datasets  # imported here because it takes seconds and few runs need it

    if path.is_dir() and not any(path.glob("*.arrow")):
        return  # an empty data set is saved without a file; load_from_disk would raise IndexError
    open_data = datasets.load_from_disk if path.is_dir() else datasets.Dataset.from_file
    try:
        opened = open_data(str(path))
    except Exception as error:  # the library may raise anything; the user must learn which file it was
        raise ValueError(f"data file {path} cannot be read as Arrow: {first_line(error)}") from error
    found = opened.column_names
    _require_columns(required, found, f"data file {path}")
    # Without the saved format (torch, numpy), which would return tensors.
    selected = opened.with_format(None).select_columns([name for name in found if name in names])
    yield from enumerate(selected, start=1)


def _require_columns(required: Columns, found: list[str], place: str) -> None:
    for name, remedy in required.items():
        if name not in found:
            raise ValueError(f"{place}: no column {name!r}, only {', '.join(found) or 'none'}: {remedy}.")


_READERS = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".arrow": _read_arrow}
