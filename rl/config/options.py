"""Typed option trees: nested dataclasses filled from an algorithm's defaults, a YAML file and dotted
overrides.

    config = load(Config, "run.yaml", ["training.tp=2", "rollout={top_p: 0.9, stop: [END]}"])

Later layers win: dataclass defaults <- `defaults` <- YAML files in their order <- overrides in theirs.
Everything is strict: an unknown key, a duplicate key or a value of the wrong type is a `ConfigError`. To read
a key before the algorithm's defaults are known, build twice from what was read once:

    raw = read("run.yaml", overrides)
    config = build(Config, raw, DEFAULTS[build(Config, raw).algorithm])

Fields may be int, float, str, bool, Literal, list[T], dict[str, T], Any, each also `| None`, and nested
dataclasses ("sections"). The rules that are not obvious:
- float takes an int, and a string that is a number (`"1e-6"`). bool is no int, and 3.0 is no int.
- YAML scalars follow YAML 1.2, so `1e-6` is a number, `yes`, `off` and `2024-01-31` are strings and `1:30` is
  not 90.
- The value of an override `a.b=value` for a str is literal: `run.name=42` names the run "42", and
  `run.name=a #1: [x]` names it "a #1: [x]". Only quotes around the whole value are read as YAML. For
  list[T] a scalar of type T stands for a list of one: `data.train=a.jsonl`. Other values are read as YAML,
  without comments, anchors, aliases, tags and documents.
- A mapping given for a section sets the keys it names; a value given for a dict replaces the whole dict, and
  `reward.kwargs.limit=3` sets one of its keys.
"""

import contextlib
import copy
import difflib
import functools
import json
import math
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
Files = str | PathLike | Sequence[str | PathLike] | None
"""Path of a YAML file, several of them, or None for no file."""
OWN_FUNCTION = "FILE.py:NAME"
"""A choice of a Literal that stands for every function in a user's file."""


class ConfigError(ValueError):
    """One sentence for the user: the key, what was found, what was expected and what would work."""


# Building a tree --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Override:
    key: str
    """Dotted key."""
    text: str
    """The text after the first '='."""

    @property
    def source(self) -> str:
        return f"override '{cut(self.key + '=' + self.text)}'"


@dataclass(frozen=True)
class Raw:
    """YAML files and overrides, parsed but not yet checked against a tree of dataclasses."""

    files: tuple[tuple[str, dict], ...]
    """Path, for messages, and content of each file; later ones win."""
    overrides: tuple[Override, ...]


def load(
    cls: type[T],
    path: Files,
    overrides: Iterable[str] = (),
    defaults: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
) -> T:
    """Return the tree of type `cls` from `defaults` (dotted key -> value), the file or files at `path`, and
    `overrides`."""
    return build(cls, read(path, overrides), defaults)


def read(path: Files, overrides: Iterable[str] = ()) -> Raw:
    """Read YAML files and overrides `a.b=value`. ConfigError where one is not well-formed."""
    files = tuple((str(file), read_file(file)) for file in _each(path))
    return Raw(files, tuple(read_override(text) for text in overrides))


def _each(path: Files) -> list[str | PathLike]:
    if path is None:
        return []
    return [path] if isinstance(path, str | PathLike) else list(path)


def last_file(path: Files) -> str | PathLike | None:
    """Return the last of the files that `path` names; None if it names none."""
    files = _each(path)
    return files[-1] if files else None


def build(cls: type[T], raw: Raw, defaults: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> T:
    """Return a new tree of type `cls`: its own defaults <- `defaults` <- `raw`. ConfigError on the first
    unknown key or wrong type."""
    config = cls()
    for key, value in dict(defaults).items():
        Layer(cls, "defaults").assign(config, key, value)
    for source, tree in raw.files:
        Layer(cls, source).fill(config, tree)
    for override in raw.overrides:
        Layer(cls, override.source).assign(config, override.key, text=override.text)
    return config


@dataclass(frozen=True)
class Layer:
    """One source of values, written over a tree."""

    root: type
    source: str

    def fill(self, section: Any, mapping: dict, prefix: str = "") -> None:
        for name, value in mapping.items():
            self.put(section, name, value, prefix)

    def put(self, section: Any, name: str, value: Any, prefix: str, text: str | None = None) -> None:
        """Set the field `name` of `section`, which has the dotted key `prefix`. text: see `assign`."""
        annotation = annotations(type(section)).get(name)  # type: ignore[arg-type]
        if annotation is None:
            self.unknown(prefix, name, leaf=name)
        key = join(prefix, name)
        if text is not None:
            value = read_value(text, annotation, self.source)
        if not is_dataclass(annotation):
            setattr(section, name, convert(value, annotation, key=key, source=self.source))
        elif isinstance(value, dict):
            self.fill(getattr(section, name), value, key)
        elif value is None:
            raise ConfigError(
                f"Section '{key}' ({self.source}) is null; give it at least one key or leave it out."
            )
        else:
            choices = (own for own, kind in tree_keys(self.root).items() if value in get_args(kind))
            meant = next((own for own in choices if parent(own) == key), f"{key}.KEY")
            raise ConfigError(
                f"'{key}' ({self.source}) is a section and needs a mapping of its keys; found "
                f"{found(value)}; did you mean {meant}={show(value)}?"
            )

    def assign(self, config: Any, dotted: str, value: Any = None, text: str | None = None) -> None:
        """Set one dotted key to a value, or to the `text` of an override as the type of the key reads it.

        Below a dict[str, ...] field the rest of the key leads into the dict.
        """
        section, prefix = config, ""
        *parents, leaf = dotted.split(".")
        for depth, name in enumerate(parents):
            annotation = annotations(type(section)).get(name)  # type: ignore[arg-type]
            if annotation is None:
                self.unknown(prefix, name, leaf=leaf)
            prefix = join(prefix, name)
            if get_origin(annotation) is dict:
                value = value if text is None else read_value(text, Any, self.source)
                value = self.dict_with(getattr(section, name), [*parents[depth + 1 :], leaf], value, prefix)
                return setattr(section, name, convert(value, annotation, key=prefix, source=self.source))
            if not is_dataclass(annotation):
                raise ConfigError(
                    f"'{prefix}' is {type_name(annotation)}, not a section, so '{dotted}' ({self.source}) "
                    f"does not exist; set {prefix} itself."
                )
            section = getattr(section, name)
        self.put(section, leaf, value, prefix, text)

    def dict_with(self, old: dict, path: list[str], value: Any, prefix: str) -> dict:
        """Return a copy of `old` with `value` at the nested `path`."""
        new = copy.deepcopy(old)
        inner = new
        for name in path[:-1]:
            inner, prefix = inner.setdefault(name, {}), join(prefix, name)
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"'{prefix}' is {found(inner)}, not a mapping, so {self.source} cannot set a key in it."
                )
        inner[path[-1]] = value
        return new

    def unknown(self, prefix: str, name: Any, leaf: Any) -> NoReturn:
        keys = tree_keys(self.root)
        place = f"in section '{prefix}'" if prefix else "at the top level"
        near = nearest_keys(self.root, prefix, str(name), str(leaf))
        if name in keys and "." in name:
            advice = "in a YAML file nest the key in its section."
        elif near:
            advice = f"did you mean {listed(near, 'or')}?"
        else:
            advice = (
                f"the keys there are {listed([last(key) for key in keys if parent(key) == prefix], 'and')}."
            )
        raise ConfigError(f"Unknown key '{name}' {place} ({self.source}); {advice}")


# Types ------------------------------------------------------------------------------------------------------

MISFIT = object()


def convert(value: Any, annotation: Any, *, key: str, source: str) -> Any:
    """Return `value` as the type `annotation`, or raise ConfigError."""
    kind, optional = without_none(annotation)
    origin = get_origin(kind)
    assert kind in (int, float, bool, str, Any) or origin in (Literal, list, dict), (
        f"{key}: unsupported type {annotation}"
    )
    if value is None and optional:
        return None
    if origin is list and isinstance(value, list):
        (element,) = get_args(kind)
        return [convert(v, element, key=f"{key}[{i}]", source=source) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        wrong = [name for name in value if not isinstance(name, str)]
        if wrong:
            raise ConfigError(
                f"{key} ({source}): found the key {found(wrong[0])}, expected keys of type str."
            )
        return {
            name: convert(v, get_args(kind)[1], key=join(key, name), source=source)
            for name, v in value.items()
        }
    converted = convert_scalar(value, kind)
    if converted is MISFIT:
        raise ConfigError(
            f"{key} ({source}): found {found(value)}, expected "
            f"{type_name(annotation)}{advice_on(value, kind)}"
        )
    return converted


def convert_scalar(value: Any, kind: Any) -> Any:
    """Return `value` as the type `kind`, which is neither a list nor a dict; MISFIT if it is of another
    type."""
    if kind is Any:
        return copy.deepcopy(value)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if OWN_FUNCTION in choices and isinstance(value, str) and re.fullmatch(r".+\.py:[A-Za-z_]\w*", value):
            return value
        fits = any(type(value) is type(choice) and value == choice for choice in choices)
        return value if fits else MISFIT
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is float and isinstance(value, str):
        return number_or_misfit(value)
    return value if type(value) is kind else MISFIT


def number_or_misfit(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return MISFIT
    return number if math.isfinite(number) else MISFIT


def without_none(annotation: Any) -> tuple[Any, bool]:
    """Return (X, True) for `X | None`, (X, False) for X."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    kinds = [kind for kind in get_args(annotation) if kind is not types.NoneType]
    assert len(kinds) == 1, f"unsupported type {annotation}: of unions only X | None"
    return kinds[0], True


def type_name(annotation: Any) -> str:
    kind, optional = without_none(annotation)
    if get_origin(kind) is Literal:
        name = f"one of {', '.join(show(choice) for choice in get_args(kind))}"
    else:
        name = kind.__name__ if get_origin(kind) is None else str(kind).replace("typing.", "")
    return f"{name} or null" if optional else name


def advice_on(value: Any, kind: Any) -> str:
    """Return the end of the sentence about a value of the wrong type."""
    if value is None:
        return "; leave the key out to get its default."
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}."
    if kind is str and type(value) in (int, float, bool):
        return "; put it in quotes."
    if kind in (int, float):
        return f"; write a {'whole ' * (kind is int)}number."
    if kind is bool:
        return " (true or false)."
    if type(value) is bool and get_args(kind)[:1] + get_args(kind)[-1:] == ("none", "full"):
        return f"; write {'full' if value else 'none'}."
    if get_origin(kind) is Literal and isinstance(value, str):
        return did_you_mean(value, [str(choice) for choice in get_args(kind)])
    return "."


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """Return the end of the sentence about a wrong word, with the nearest choice in any case of letters."""
    own = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(value.casefold(), own, n=1)
    return f"; did you mean {show(own[close[0]])}?" if close else "."


def found(value: Any) -> str:
    return "null" if value is None else f"{show(value)} ({type(value).__name__})"


def show(value: Any, width: int = 70) -> str:
    """Return a value as YAML and JSON write it, cut to `width` characters."""
    return cut(json.dumps(value, default=str, ensure_ascii=False), width)


def cut(text: str, width: int = 70) -> str:
    """Return at most `width` characters of a text, for a message."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


# Keys -------------------------------------------------------------------------------------------------------


@functools.cache
def annotations(cls: Any) -> dict[str, Any]:
    """Return field name -> type, in order."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


@functools.cache
def tree_keys(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> type of every section and leaf, in order; the type of a section is its
    dataclass."""
    keys = {}
    for name, annotation in annotations(cls).items():
        keys[join(prefix, name)] = annotation
        if is_dataclass(annotation):
            keys |= tree_keys(annotation, join(prefix, name))  # type: ignore[arg-type]
    return keys


def nearest_keys(root: type, prefix: str, name: str, leaf: str) -> list[str]:
    """Return up to three valid keys that an unknown `name` in section `prefix` may stand for.

    `leaf` is the last part of the key as the user wrote it, which may lie elsewhere in the tree. A key of the
    section that begins with `name`, or has it as its last words, scores as high as an equal key elsewhere;
    the section's keys come first.
    """
    scores = {}
    for key in tree_keys(root):
        here, anywhere = similarity(name, last(key)), similarity(leaf, last(key))
        part = name.lower().replace("-", "_")
        is_part = last(key).startswith(part) or last(key).endswith(f"_{part}")
        if parent(key) == prefix and len(name) >= 3 and is_part:
            here = 1.0
        if anywhere >= 0.8 or (here >= 0.6 and parent(key) == prefix):
            scores[key] = max(here, anywhere) if parent(key) == prefix else anywhere
    best = [key for key, score in scores.items() if score == max(scores.values())]
    written = join(prefix, name if name == leaf else f"{name}.{leaf}")
    closest = [key for key in best if parent(key) == prefix] or [
        key for key in best if similarity(written, key) >= 0.7
    ]
    return (closest or best)[:3]


def advice_on_key(root: type, key: str) -> str:
    """Return the end of the sentence about a dotted key that does not exist."""
    near = nearest_keys(root, parent(key), last(key), last(key))
    return f"did you mean {listed(near, 'or')}?" if near else "lockstep train --help all lists them."


def similarity(a: str, b: str) -> float:
    """Return 1 for equal names, 0.9 if b consists of a's initials (learning_rate, lr), otherwise difflib's
    ratio."""
    a, b = a.lower().replace("-", "_"), b.lower()
    initials = "".join(word[:1] for word in a.split("_"))
    if "_" in a and initials == b:
        return 0.9
    return difflib.SequenceMatcher(None, a, b).ratio()


def join(prefix: str, name: Any) -> str:
    return f"{prefix}.{name}" if prefix else str(name)


def parent(key: str) -> str:
    return key.rpartition(".")[0]


def last(key: str) -> str:
    return key.rpartition(".")[2]


def listed(words: Iterable[Any], conjunction: str) -> str:
    """Return "1, 2 or 4" for [1, 2, 4] and "or"."""
    *first, final = (str(word) for word in words)
    return f"{', '.join(first)} {conjunction} {final}" if first else final


# YAML -------------------------------------------------------------------------------------------------------

# Bools, ints and floats as in YAML 1.2. PyYAML follows YAML 1.1, in which 1e-6 is a string, `off` is a bool,
# and 010 is eight.
SCALARS = (
    ("bool", "tTfF", r"true|True|TRUE|false|False|FALSE"),
    ("int", "-+0123456789", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)"),
    (
        "float",
        "-+.0123456789",
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    ),
)
TAG = "tag:yaml.org,2002:"
NULLS = ("~", "null", "Null", "NULL")


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 scalars. A duplicate key, and an anchor that contains itself, are
    errors."""

    yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag in (TAG + "null", TAG + "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        node = super().compose_node(parent, index)
        if node is not None and node.end_mark is None:  # an alias of a node that is still being read
            problem = f"the anchor '{event.anchor}' contains itself"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key '{key.value}' occurs twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return node


class Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper without anchors. It quotes a string if YAML 1.1 or YAML 1.2 would not read it as a
    string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _first, _regexp in SCALARS:
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(TAG + _name, re.compile(f"^(?:{_regexp})$"), list(_first))


def parse_yaml(text: str, source: str) -> Any:
    with yaml_errors(source):
        return yaml.load(text, Loader)


@contextlib.contextmanager
def yaml_errors(source: str) -> Iterator[None]:
    """Raise an error of YAML in the body as ConfigError."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem or error.context or ""
        tab = r"'\t'" in problem
        remedy = "indent with spaces instead of tabs" if tab else "correct the YAML there"
        raise ConfigError(f"{source}{line}: {problem}; {remedy}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}.") from error


def read_file(path: str | PathLike) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        place = "" if Path(path).is_absolute() else f" (working directory {Path.cwd()})"
        own = Path(path, "config.yaml")
        remedy = f"name {own} in it" if own.is_file() else f"correct the path{place}"
        raise ConfigError(f"Config file {path} cannot be read: {error.strerror}; {remedy}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"Config file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8."
        ) from error
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: found {found(tree)}, expected a mapping of sections and keys; write e.g. run: "
            "{seed: 2}."
        )
    return tree


def read_override(argument: str) -> Override:
    key, equals, text = argument.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"Override '{argument}' is not of the form key=value, e.g. run.seed=2.")
    return Override(key.strip(), text)


def read_value(text: str, annotation: Any, source: str) -> Any:
    """Return the value of an override for a key of this type; the module's docstring has the rules."""
    kind, _ = without_none(annotation)
    is_list, bare = get_origin(kind) is list, text.strip()
    element = get_args(kind)[0] if is_list else kind
    takes_text = element is str and not (is_list and bare[:1] == "[") and bare not in NULLS
    has_marks = is_collection = False
    try:
        with yaml_errors(source):
            for event in yaml.parse(text, Loader):
                marks = (getattr(event, name, None) for name in ("anchor", "tag"))
                has_marks = has_marks or any(marks) or getattr(event, "explicit", None) is True
                is_collection = is_collection or isinstance(event, yaml.CollectionStartEvent)
        value = text if has_marks else parse_yaml(text, source)
    except ConfigError as error:
        if not takes_text and (kind is not Any or has_marks or bare[:1] in tuple("[{'\"|>")):
            raise ConfigError(f'{error} Write a text in quotes: "...".') from error
        value, has_marks = text, False
    if has_marks and (is_collection or not takes_text):
        raise ConfigError(
            f"{source}: anchors, aliases, tags and documents of YAML are not read here; write the value."
        )
    if takes_text:
        is_quoted = isinstance(value, str) and bare[:1] + bare[-1:] in ("''", '""')
        return [value if is_quoted else text] if is_list else value if is_quoted else text
    if isinstance(value, str) and bare[:1] not in tuple("'\"|>"):
        return bare
    if is_list and value is not None and not isinstance(value, list | dict):
        only = convert_scalar(value, element)
        return value if only is MISFIT else [only]
    return value


def as_override(key: str, value: Any) -> str:
    """Return the override that gives a key this value, whatever its type."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w./][\w./:=+,-]*", value)
    if isinstance(value, str) and not (is_plain and parse_yaml(value, key) == value):
        return f"{key}={json.dumps(value, ensure_ascii=False)}"
    return f"{key}={as_text(value)}"


def as_text(value: Any) -> str:
    """Return a value as it is written after `key=`; a text as it stands."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return json.dumps(value, default=str, ensure_ascii=False)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of every leaf, in order. A dict[str, ...] field is a leaf."""
    leaves: dict[str, Any] = {}
    for name in annotations(type(config)):  # type: ignore[arg-type]
        value = getattr(config, name)
        leaves |= flatten(value, join(prefix, name)) if is_dataclass(value) else {join(prefix, name): value}
    return leaves


def to_yaml(config: Any) -> str:
    """Return a whole tree, or a mapping of some of its keys, as YAML, which `load` reads back."""
    tree = asdict(config) if is_dataclass(config) and not isinstance(config, type) else config
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
