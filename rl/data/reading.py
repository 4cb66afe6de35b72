"""Reads the rows of data files: parquet, JSON lines or arrays, and Arrow files of the `datasets` library.

Every rank reads the files into its own memory, so thousands of ranks need not share a disk cache. A few
thousand rows take seconds. Every error is a ValueError that names the file and, if possible, the row.
"""

import contextlib
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl.models.json_files import refuse_pointer, similar_beside

log = logging.getLogger(__name__)

Columns = Mapping[str, str]
"""Required column -> remedy for the error if the column is missing, such as `name the column ... in
data.x_key`."""
Rows = Iterator[tuple[int, dict[str, Any]]]
"""Pairs of a row's number and its values by column."""
MAPPINGS = ("reward_model", "extra_info", "tools_kwargs", "interaction_kwargs")
"""Columns that hold objects, or JSON texts of objects."""
MAX_LEVELS = 100
"""Maximum nesting of a JSON value. There is a limit because Python allows only 1,000 nested calls to
functions that walk a value."""

CHUNK = 1 << 24
"""Bytes that are read at once to find the lines of a file."""
BLOCK = 4096
"""Rows of a parquet file that are kept together after one of them was read again."""
MESSAGES = re.compile(
    r"""\s*(?:\[\s*\{\s*["'](?:role|from|content|value)["']\s*:"""
    r"""|\{\s*["'](?:messages|conversations?)["']\s*:\s*\["""
    r"""|\[?\s*\{[^{}]*?["'](?:role|from)["']\s*:\s*["'](?:system|developer|user|human)["'])"""
)
"""Matches the beginning of a JSON text of messages, of one message, or of an object with messages."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class FileRow:
    """A row of a file, and its position for error messages."""

    values: dict[str, Any]
    path: Path
    number: int
    """Number of the row in the file, from 1; in a file of JSON lines, the number of its line."""
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
    files: Sequence[str | Path],
    *,
    required: Columns,
    optional: Sequence[str] = (),
    reads_all: bool = False,
    max_rows: int = 0,
) -> list[FileRow]:
    """Return the rows of `files` in order.

    files: `.parquet`, `.jsonl`, `.json`, `.arrow`, or a directory written by `Dataset.save_to_disk` of the
    datasets library. required: columns that each file must have. optional: columns that are read if they
    exist. reads_all: whether to read the other columns too. max_rows: maximum number of rows; 0 reads all.

    A column of MAPPINGS may hold the JSON text of an object, and a required column the JSON text of messages.
    Such texts are decoded.

    Raises ValueError for an empty list, a missing, unreadable, empty or unsupported file, a column that is
    missing or exists twice, and text without the expected object or messages.
    """
    check_data_files(files)
    rows: list[FileRow] = []
    names = {*required, *optional}
    mappings = [name for name in MAPPINGS if reads_all or name in names]
    for source, path in enumerate(map(Path, files)):
        num_before = len(rows)
        for number, values in _reader(path)(path, None if reads_all else names, required):
            if max_rows and len(rows) == max_rows:
                return rows
            row = FileRow(values, path, number, source)
            _decode_texts(row, mappings, required)
            rows.append(row)
        if len(rows) == num_before:
            raise ValueError(f"data file {path} has no rows; correct the path, or write the file again.")
    if not rows:
        raise ValueError(
            "data.train is empty: name at least one .parquet, .jsonl, .json or .arrow file or directory."
        )
    return rows


def read_row(place: str) -> FileRow:
    """Read one row of a file again, with all columns, by its position alone.

    place: `FileRow.place` of the row. JSON texts in MAPPINGS are decoded, those of messages are not.
    """
    name, _, number = place.rpartition(", row ")
    path = Path(name)
    row = FileRow(_row_at(path, int(number)), path, int(number), 0)
    _decode_texts(row, MAPPINGS, {})
    return row


def _row_at(path: Path, number: int) -> dict[str, Any]:
    """Return the values of row `number`, from 1; in a file of JSON lines, of line `number`."""
    if path.suffix in (".jsonl", ".json"):
        starts = _line_starts(path)
        if not starts.size:
            return dict(_array(path)[number - 1])
        with path.open("rb") as file:
            file.seek(starts[number - 1])
            return dict(_parse(file.readline().decode("utf-8-sig"), str(path)))
    if _is_parquet(path):
        with _reading(path, "parquet"):
            group, block, place = _place_in(path, number)
            table = _block(path, group, block).slice(place, 1)
    else:
        import datasets  # imported here because it takes seconds and few runs need it

        opened = (datasets.load_from_disk if path.is_dir() else datasets.Dataset.from_file)(str(path))
        table = opened.with_format("arrow")[number - 1 : number]
    return next(_values(iter([table]), path, "Arrow"))[1]


@functools.lru_cache(maxsize=1024)
def _line_starts(path: Path) -> np.ndarray:
    """Return where each line of a JSON file starts, in bytes, int64; none if the file is an array."""
    starts, at = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            if not at and chunk.decode("utf-8-sig", errors="ignore").lstrip()[:1] == "[":
                return np.empty(0, np.int64)
            starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + at + 1)
            at += len(chunk)
    return np.concatenate(starts)


@functools.lru_cache(maxsize=2)
def _array(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON array. It is parsed once, because it has no lines to look up."""
    return list(_parse(path.read_text("utf-8-sig"), str(path)))


@functools.lru_cache(maxsize=16)
def _groups(path: Path) -> tuple[np.ndarray, list[int]]:
    """Return the number of rows before each row group of a parquet file and in the file, and their bytes."""
    meta = pq.read_metadata(path)
    groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
    return np.cumsum([0, *(each.num_rows for each in groups)]), [each.total_byte_size for each in groups]


def _place_in(path: Path, number: int) -> tuple[int, int, int]:
    """Return the row group of row `number`, from 1, its block in the group, and its place in the block."""
    starts, _ = _groups(path)
    group = int(np.searchsorted(starts, number, side="left")) - 1
    return group, *divmod(number - 1 - int(starts[group]), BLOCK)


@functools.lru_cache(maxsize=8)
def _block(path: Path, group: int, number: int) -> pa.Table:
    """Return a block of BLOCK rows of a row group. The blocks before it are decoded and dropped."""
    with pq.ParquetFile(path) as file:
        batches = file.iter_batches(BLOCK, row_groups=[group])
        return pa.Table.from_batches([next(itertools.islice(batches, number, None))])


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet" and path.is_file()


def num_rows(files: Sequence[str | Path]) -> int:
    """Return the number of rows of the parquet files among `files`."""
    return sum(int(_groups(path)[0][-1]) for path in map(Path, files) if _is_parquet(path))


def row_bytes(place: str) -> int:
    """Return about how many bytes `read_row` decodes: for a parquet file, its row group up to the row."""
    name, _, number = place.rpartition(", row ")
    path = Path(name)
    if not _is_parquet(path):
        return 0
    group, block, _ = _place_in(path, int(number))
    starts, sizes = _groups(path)
    num_rows = int(starts[group + 1] - starts[group])
    return sizes[group] * min(num_rows, (block + 1) * BLOCK) // num_rows


def describe(value: Any) -> str:
    """Return the type of a value and the beginning of its `repr`, for error messages."""
    if value is None:
        return "missing"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the details that libraries append."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def check_data_files(files: Sequence[str | Path], *, key: str = "") -> None:
    """Raise ValueError for a file that does not exist or has an unsupported form.

    key: config key that names the files.
    """
    for file in files:
        _check_kind(Path(file), f"{key}={file}" if key else f"data file {file}")


def _check_kind(path: Path, name: str) -> None:
    if "://" in name:
        raise ValueError(f"{name} is a URL, and Lockstep reads files; download it, and name the file.")
    refuse_pointer(path)
    if path.is_dir():
        if (splits_file := path / "dataset_dict.json").is_file():
            with _reading(splits_file, "JSON"):
                splits = list(map(str, json.loads(splits_file.read_text()).get("splits", [])))
            raise ValueError(
                f"{name} is a DatasetDict with the splits {', '.join(splits) or '(none)'}; name "
                f"the directory of one of them, such as {path / (splits[0] if splits else 'train')}."
            )
        if not (path / "state.json").is_file():
            raise ValueError(
                f"{name} is a directory without state.json, so save_to_disk of datasets did not "
                "write it; name the files in it instead."
            )
    elif not path.is_file():
        remedy = "correct the path" + ", or name several files as [A, B]" * ("," in str(path))
        if path.parts[:-1] and not path.suffix and not path.is_absolute():
            remedy += (
                f", or download the data set (hf download {path} --repo-type dataset --local-dir DIR) and "
                "name its files"
            )
        meant = similar_beside(path, lambda entry: entry.suffix in _READERS and entry.is_file())
        place = f"working directory {Path.cwd()}"
        raise ValueError(f"{name} does not exist ({place}); {meant}{remedy}.")
    elif path.suffix not in _READERS:
        raise ValueError(
            f"{name} ends in {path.suffix!r}, but must be .parquet, .jsonl, .json, .arrow, or a "
            "directory that save_to_disk of datasets wrote; convert it to one of them."
        )


def _reader(path: Path) -> Callable[[Path, set[str] | None, Columns], Rows]:
    return _read_arrow if path.is_dir() else _READERS[path.suffix]


def _decode_texts(row: FileRow, mappings: Sequence[str], required: Columns) -> None:
    """Decode, in place, the JSON texts of objects and of messages in a row."""
    values = row.values
    for name in mappings:
        if (value := values.get(name)) is None or isinstance(value, dict):
            continue
        if isinstance(value, str):
            value = values[name] = _parse(value, f"{row.place}: column {name!r}")
        if value is not None and not isinstance(value, dict):
            raise ValueError(
                f"{row.place}: column {name!r} must be an object or the JSON text of one, such as "
                f'{{"ground_truth": "4"}} in reward_model, not {describe(value)}.'
            )
    for name in required:
        if isinstance(value := values[name], str) and MESSAGES.match(value):
            remedy = ", although its text begins like JSON; store them as a list or as JSON text"
            values[name] = _parse(value, f"{row.place}: messages in column {name!r}", remedy)
            if row.number == 1:
                log.info("column %r of %s has messages as JSON text, which is decoded", name, row.path)


def _parse(text: str, place: str, remedy: str = "") -> Any:
    """Return the value of a JSON text. Raise ValueError that begins with `place` for invalid JSON."""
    try:
        value = _DECODER.decode(text)
        is_deep = text.count("{") + text.count("[") > MAX_LEVELS and not is_within(value, MAX_LEVELS)
    except RecursionError:
        is_deep = True
    except ValueError as error:  # invalid JSON, or an integer with more digits than Python reads
        raise ValueError(f"{place}: not JSON{remedy}: {error}; correct the text.") from error
    if is_deep:
        raise ValueError(f"{place}: nested in more than {MAX_LEVELS} levels; store the inner part as text.")
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{place}: {ascii(error.object[error.start])} is half of a character (a lone surrogate), "
                "which no tokenizer reads; remove it, or write the whole character."
            ) from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON text. Raise ValueError for a duplicate key, because one value would be
    lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {max(names, key=names.count)!r} twice; rename one")
    return found


def is_within(value: Any, levels: int) -> bool:
    """Return whether a JSON value has at most `levels` nested lists and objects."""
    if not isinstance(value, (dict, list)):
        return True
    children = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_within(child, levels - 1) for child in children)


def _read_parquet(path: Path, names: set[str] | None, required: Columns) -> Rows:
    """Yield (row number from 1, values) of a parquet file."""
    # The file is read in batches, because a nested column of more than 2 GiB cannot be read at once.
    # pq.read_table is not used, because it takes a directory named a=b for a partition and adds a column a.
    with _reading(path, "parquet"):
        file = pq.ParquetFile(path)
    with file:
        found = _check_columns(file.schema_arrow.names, names, required, f"data file {path}")
        yield from _values(file.iter_batches(columns=found), path, "parquet")


def _read_json(path: Path, names: set[str] | None, required: Columns) -> Rows:
    """Yield (number, values) for each object of a file. The file has one object per line, or an array of
    objects.

    Empty lines are skipped. Lines are parsed with `json`. Arrow's reader is not used, because it converts
    strings that look like timestamps and requires the same type in every row.
    """
    try:
        text = (content := path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise ValueError(
            f"data file {path} cannot be read: {first_line(error)}; correct the path, or copy it again."
        ) from error
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, row {number}: not UTF-8 ({error}); convert the file to UTF-8.") from error
    del content
    is_array = text.lstrip()[:1] == "["
    lines = [text] if is_array else text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"data file {path}" if is_array else f"{path}, row {number}"
        value = _parse(line, place, _FORMS)
        for own, values in enumerate(value if is_array else [value], start=number):
            if not isinstance(values, dict):
                raise ValueError(f"{path}, row {own}: must be a JSON object, not {describe(values)}.")
            found = _check_columns(list(values), names, required, f"{path}, row {own}")
            yield own, {name: values[name] for name in found}


def _read_arrow(path: Path, names: set[str] | None, required: Columns) -> Rows:
    """Yield (row number from 1, values) of an Arrow file or a directory of `save_to_disk`.

    The datasets library is needed, because a saved selection of rows is stored as an index that it applies.
    """
    import datasets  # imported here because it takes seconds and few runs need it

    if path.is_dir() and not any(path.glob("*.arrow")):
        return  # an empty data set is saved without a file, for which load_from_disk would raise IndexError
    with _reading(path, "Arrow"):
        opened = (datasets.load_from_disk if path.is_dir() else datasets.Dataset.from_file)(str(path))
    found = _check_columns(opened.column_names, names, required, f"data file {path}")
    # Read the rows as Arrow tables. The format saved with the data set might return tensors or decode images.
    yield from _values(opened.select_columns(found).with_format("arrow").iter(1000), path, "Arrow")


def _values(batches: Iterator[Any], path: Path, form: str) -> Rows:
    """Yield (row number from 1, values) of Arrow batches or tables. Columns of the type JSON are decoded."""
    number = 0
    while True:
        with _reading(path, form):
            if (batch := next(batches, None)) is None:
                return
            has_maps = any(map(_has_maps, batch.schema.types))
            rows = batch.to_pylist(**({"maps_as_pydicts": "strict"} if has_maps else {}))
        decoders = {field.name: decode for field in batch.schema if (decode := _json_decoder(field.type))}
        for values in rows:
            number += 1
            for name, decode in decoders.items():
                values[name] = decode(values[name], f"{path}, row {number}: column {name!r}")
            yield number, values


def _json_decoder(type: pa.DataType) -> Callable[[Any, str], Any] | None:
    """Return a function decode(value, place) for an Arrow type that contains JSON texts; None if it has none.

    The datasets library stores lists of unlike objects as JSON, for example messages with and without tool
    calls.
    """
    if isinstance(type, pa.BaseExtensionType):
        if type.extension_name == "arrow.json":
            return lambda value, place: None if value is None else _parse(value, place)
        type = type.storage_type
    if pa.types.is_struct(type):
        fields = {field.name: decode for field in type if (decode := _json_decoder(field.type))}
        if fields:
            return lambda value, place: (
                value and value | {name: decode(value[name], place) for name, decode in fields.items()}
            )
    elif pa.types.is_nested(type) and type.num_fields == 1 and not pa.types.is_map(type):
        if decode := _json_decoder(type.field(0).type):
            return lambda value, place: value and [decode(item, place) for item in value]
    return None


def _has_maps(type: pa.DataType) -> bool:
    """Return whether a type contains a map. `to_pylist` converts maps to pairs or, more slowly, to dicts."""
    return pa.types.is_map(type) or any(_has_maps(type.field(i).type) for i in range(type.num_fields))


@contextlib.contextmanager
def _reading(path: Path, form: str) -> Iterator[None]:
    """Convert any error in the `with` block, which reads a file, to a ValueError that names the file."""
    try:
        yield
    except Exception as error:  # the library may raise anything; the user must learn which file it was
        raise ValueError(
            f"data file {path} cannot be read as {form}: {first_line(error)}; copy it again."
        ) from error


def _check_columns(found: list[str], names: set[str] | None, required: Columns, place: str) -> list[str]:
    """Return the columns to read, of `names` or (None) all. Raise ValueError if one is missing or exists
    twice."""
    for name, remedy in required.items():
        if name not in found:
            raise ValueError(
                f"{place}: no column {name!r}, only {', '.join(found) or 'none'}; {remedy}, which "
                "data.train and data.val share (data.val=[] leaves validation out)."
            )
    own = [name for name in found if names is None or name in names]
    if len(own) > len(set(own)):
        raise ValueError(f"{place}: column {max(own, key=own.count)!r} exists twice; rename one.")
    return own


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_FORMS = " (a file has one object per line, or is one array of objects)"
_READERS = {".parquet": _read_parquet, ".jsonl": _read_json, ".json": _read_json, ".arrow": _read_arrow}
