"""The command line of train_rl.py, and the help with every key of an option tree."""

import argparse
import ast
import functools
import inspect
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rl.config.declarations import texts_under
from rl.config.options import flatten, last, listed, nearest_keys, parent, show, tree_keys, type_name


@dataclass(frozen=True)
class CommandLine:
    config: list[str]
    """Paths of the YAML files; later ones win."""
    overrides: list[str]
    """Arguments of the form key=value, in their order."""
    print_config: bool
    """Print the resolved config and leave."""
    changed: bool = False
    """Print only the keys that differ from the defaults."""


def make_parser(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """Return a parser of whole words that prints its description, a module's docstring, as it is written."""
    options |= dict(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    return argparse.ArgumentParser(allow_abbrev=False, **options)


def bounds(text: str) -> tuple[float, float]:
    """Return the range that LOW:HIGH names, both included, for example 1 and infinity for "1:"."""
    low, colon, high = text.partition(":")
    try:
        first = float(low) if low else -math.inf
        return first, (float(high) if high else math.inf) if colon else first
    except ValueError:
        dashed = re.fullmatch(r"(\d+)-(\d+)", text)
        example = (
            f"LOW:HIGH, here {dashed[1]}:{dashed[2]}" if dashed else "LOW:HIGH, LOW:, :HIGH or one value"
        )
        raise argparse.ArgumentTypeError(f"{text!r} is not a range; write {example}") from None


def parse_command_line(
    cls: type,
    argv: list[str],
    *,
    program: str = "train_rl.py",
    description: str | None = None,
    first: Sequence[str] = (),
    other_help: Callable[[str], str] = lambda word: "",
) -> CommandLine:
    """Parse `--config FILE [key=value ...] [--print-config [--changed]]`, in any order.

    `--help` among the arguments prints the usage, the keys `first` of `cls` and its sections, exit code 0. A
    word after it selects keys (`selected`), and `other_help` may have a text for it, too ("": none). A usage
    error exits with code 2.
    """
    usage = "%(prog)s --config FILE [key=value ...] [--print-config | --dry-run] [--help [WORD]]"
    parser = make_parser(description, prog=program, usage=usage, add_help=False)
    add_config(parser, about="YAML file with any of the keys below")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    parser.add_argument("--changed", action="store_true", help="with --print-config: without defaults")
    parser.add_argument("--dry-run", action="store_true", help="estimate whether it fits: --dry-run --help")
    word_help = (
        "this text; with a section: its keys; with a word: keys whose name or text has it, and metrics whose "
        "name has it; all: every key"
    )
    parser.add_argument("-h", "--help", metavar="WORD", nargs="?", help=word_help)
    if asked := {"-h", "--help"} & set(argv):
        word = "".join(argv[argv.index(asked.pop()) + 1 :][:1])
        if not word or word.startswith("-") or "=" in word:
            print(f"{parser.format_help()}\n{help_text(cls, only=first)}\n{sections_text(cls)}")
            raise SystemExit(0)
        keys = selected(cls, word)
        of_section = word == "all" or any(key.startswith(f"{word}.") for key in keys)
        texts = [help_text(cls, only=keys) if keys else "", "" if of_section else other_help(word)]
        if not any(texts):
            parser.error(f"--help {word}: no section, key, text of a key or metric has this word")
        print("\n".join(filter(None, texts)))
        raise SystemExit(0)
    files = [argument for argument in argv if argument.endswith((".yaml", ".yml")) and "=" not in argument]
    if files and not any(argument.startswith("--config") for argument in argv):
        parser.error(f"'{files[0]}' is not of the form key=value; write --config {files[0]}")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(f"unknown argument {unknown[0]}{_hint(cls, unknown[0], argv, first)}")
    for override in arguments.overrides:
        if "=" not in override:
            parser.error(f"argument '{override}' is not of the form key=value, such as run.seed=2")
    return CommandLine(
        arguments.config, arguments.overrides, arguments.print_config or arguments.changed, arguments.changed
    )


def _hint(cls: type, unknown: str, argv: list[str], first: Collection[str]) -> str:
    """Return the end of the sentence about an unknown option: what it belongs to, or the keys that it means.

    first: keys that are meant rather than others.
    """
    name, _, value = unknown.lstrip("-").partition("=")
    if name == "world-size":
        return (
            ", which belongs to --dry-run; in a run the launcher (torchrun, srun or mpirun) sets the number "
            "of ranks"
        )
    keys = flatten(cls())
    if name in keys and value:
        return f"; to set a key write {name}={value} without dashes"
    near = [key for key in nearest_keys(cls, parent(name), last(name), last(name)) if key in keys]
    after = "" if value else "".join(argv[argv.index(unknown) + 1 :][:1])
    value = value or ("VALUE" if not after or after.startswith("-") or "=" in after else after)
    meant = [f"{key}={value}" for key in near if key in first] or [f"{key}={value}" for key in near]
    return f"; did you mean {listed(meant, 'or')}?" if meant else ""


def add_config(
    parser: argparse.ArgumentParser, *, required: bool = True, about: str = "YAML file of the run"
) -> None:
    """Add --config, whose value becomes a list of files or None, and the overrides.

    Parse with `parse_intermixed_args`, so that options may stand between the overrides.
    """
    several = f"{about}; of several --config, later ones win key by key"
    parser.add_argument("--config", metavar="FILE", action="append", required=required, help=several)
    overrides = "set one key over the files, e.g. training.tp=2"
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=overrides)


def selected(cls: type, word: str) -> list[str]:
    """Return the keys of a section, or else those with the word in name or text; for "all", every key."""
    keys, docs = list(flatten(cls())), tree_docs(cls)
    if word == "all":
        return keys
    of_section = [key for key in keys if key == word or key.startswith(f"{word}.")]
    return of_section or [key for key in keys if word.lower() in f"{key} {docs[key]}".lower()]


def sections_text(cls: type) -> str:
    """Return the sections at the top level, each with its number of keys and the names of its first ones."""
    lines = ["sections (--help SECTION, --help WORD, --help all)"]
    for section in (key for key, kind in tree_keys(cls).items() if is_dataclass(kind) and "." not in key):
        keys = [key.removeprefix(f"{section}.") for key in selected(cls, section)]
        count = f"{len(keys)} key{'s' if len(keys) > 1 else ' '}"
        lines.append(f"  {section:19}{count:9}{', '.join(keys[:4])}{', ...' * (len(keys) > 4)}")
    return "\n".join(lines) + "\n"


def help_text(cls: type, width: int | None = None, *, only: Collection[str] | None = None) -> str:
    """Return every key, or the keys `only`, with type, default and doc, grouped by section.

    width: columns to wrap to (None: the terminal's)."""
    columns = min(max(width or shutil.get_terminal_size().columns, 40), 120)
    wrap = functools.partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    keys, docs, defaults = tree_keys(cls), tree_docs(cls), flatten(cls())
    blocks = []
    for section in ["", *(key for key, annotation in keys.items() if is_dataclass(annotation))]:
        lines = [section or "top level"]
        for key in (key for key in defaults if parent(key) == section and (only is None or key in only)):
            about = f"{key}  ({type_name(keys[key])}; default {show(defaults[key])})"
            lines.append(wrap(about, initial_indent="  ", subsequent_indent="    "))
            lines.append(wrap(docs[key], initial_indent="      ", subsequent_indent="      "))
        if len(lines) > 1:
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def tree_docs(cls: type) -> dict[str, str]:
    """Return dotted key -> doc of every section and leaf, in one line; "" where there is none."""
    sections = {"": cls} | tree_keys(cls)
    return {key: field_docs(sections[parent(key)]).get(last(key), "") for key in tree_keys(cls)}


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return field name -> doc: the string literal under the field in the source of `cls` or a base class, or
    the field's metadata "doc"."""
    docs = {field.name: field.metadata["doc"] for field in fields(cls) if "doc" in field.metadata}
    for ancestor in (c for c in reversed(cls.__mro__) if is_dataclass(c)):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(ancestor))).body
        assert isinstance(definition, ast.ClassDef)
        docs |= texts_under(definition)
    return docs
