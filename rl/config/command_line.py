"""The command line of train_rl.py, and the help with every key of an option tree."""

import argparse
import ast
import difflib
import functools
import inspect
import itertools
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
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


class Parser(argparse.ArgumentParser):
    """A parser whose sentence about an unknown argument names the option, key or file that it means."""

    keys: type | None = None
    """Tree of the keys that the overrides set (`add_config`)."""
    first: Collection[str] = ()
    """Keys that are meant rather than others."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        argv = sys.argv[1:] if args is None else [*args]
        is_whole = self._subparsers is None and not {"-h", "--help"} & {*argv}
        words = itertools.takewhile("--".__ne__, argv) if is_whole else ()
        for before, word in itertools.pairwise(["", *words]):
            owner = self._option_string_actions.get(before)
            if " " in word:  # no option, as for argparse
                continue
            if owner is not None and owner.nargs is None:  # takes a value
                if re.match(r"-[^-]", word) and not re.fullmatch(r"-\d*\.?\d+", word):
                    self.error(f"the value of {before} begins with -; write {before}={word}")
            elif re.match(r"--?[A-Za-z]", word) and word.partition("=")[0] not in self._option_string_actions:
                self.error(f"unknown argument {word}{self._meant(word, argv)}")
        return super().parse_known_args(args, namespace)

    def parse_run(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse arguments after `add_config`. A word without "=" is refused with the way to name it."""
        has_config = any(word.startswith("--config") for word in argv)
        for before, word in () if has_config else itertools.pairwise(["", *argv]):
            owner = self._option_string_actions.get(before)
            is_value = owner is not None and owner.nargs != 0
            if not word.startswith("-") and not is_value and (way := way_to_name(word, has_config=False)):
                self.error(way)
        if not has_config and argv and not argv[0].startswith("-") and "=" not in argv[0]:
            self.error(f"'{argv[0]}' is neither a file nor key=value; name the run's YAML file in --config")
        arguments = self.parse_intermixed_args(argv)
        for word in arguments.overrides:
            if "=" not in word:
                no_key = f"argument '{word}' is not of the form key=value, such as run.seed=2"
                self.error(way_to_name(word, has_config=has_config) or no_key)
        return arguments

    def _meant(self, unknown: str, argv: list[str]) -> str:
        """Return the end of the sentence about an unknown option: what it belongs to, or what it means."""
        name, _, value = unknown.lstrip("-").partition("=")
        if name == "world-size" and self.keys is not None:
            return (
                ", which belongs to --dry-run; in a run the launcher (torchrun, srun or mpirun) sets the "
                "number of ranks"
            )
        keys = {} if self.keys is None else flatten(self.keys())
        if name in keys and value:
            return f"; to set a key write {name}={value} without dashes"
        own = [option.removeprefix("--") for option in self._option_string_actions if option[:2] == "--"]
        begun = [option for option in own if len(name) > 2 and option.startswith(name)]
        if options := begun or difflib.get_close_matches(name.replace("_", "-"), own, 1, 0.65):
            return f"; did you mean --{options[0]}?"
        near = nearest_keys(self.keys, parent(name), last(name), last(name)) if self.keys else []
        near = [key for key in near if key in keys]
        after = "" if value else "".join(argv[argv.index(unknown) + 1 :][:1])
        value = value or ("VALUE" if not after or after.startswith("-") or "=" in after else after)
        meant = [f"{key}={value}" for key in near if key in self.first] or [f"{key}={value}" for key in near]
        return f"; did you mean {listed(meant, 'or')}?" if meant else ""


def way_to_name(word: str, *, has_config: bool) -> str:
    """Return how to name a YAML file, the directory of a run or a checkpoint; "" for another word.

    has_config: whether the command line has --config already.
    """
    path = Path(word)
    if path.suffix in (".yaml", ".yml") and "=" not in word:
        return f"'{word}' is not of the form key=value; write --config {word}"
    with suppress(OSError):  # a word that cannot be a file's name, or a directory that may not be entered
        if "=" not in word and (path / "config.yaml").is_file():
            return _way_to_run(path, word, has_config)
    return ""


def _way_to_run(path: Path, word: str, has_config: bool) -> str:
    """Return how to name a directory with a config.yaml: a checkpoint's, or a run's."""
    config = "" if has_config else f"--config {path / 'config.yaml'}"
    if (path / "checkpoint.json").is_file():
        words = f"{config} checkpoint.resume={word}".lstrip()
        return f"'{word}' is a checkpoint, not key=value; write {words}"
    return f"'{word}' is the directory of a run, not key=value; write {config or f'run.dir={word}'}"


def make_parser(description: str | None, **options: Any) -> Parser:
    """Return a parser of whole words that prints its description, a module's docstring, as it is written."""
    options |= dict(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    return Parser(allow_abbrev=False, **options)


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
    add_config(parser, cls, first=first, about="YAML file with any of the keys below")
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
            said = " ".join(f"{key} {doc}" for key, doc in tree_docs(cls).items())
            known = set(re.findall(r"[a-z]{3,}", said.lower()))
            near = difflib.get_close_matches(word.lower(), known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            parser.error(f"--help {word}: no section, key, text of a key or metric has this word{meant}")
        print("\n".join(filter(None, texts)))
        raise SystemExit(0)
    arguments = parser.parse_run(argv)
    return CommandLine(
        arguments.config, arguments.overrides, arguments.print_config or arguments.changed, arguments.changed
    )


def add_config(
    parser: Parser,
    cls: type,
    *,
    first: Collection[str] = (),
    required: bool = True,
    about: str = "YAML file of the run",
) -> None:
    """Add --config, whose value becomes a list of files or None, and the overrides of keys of `cls`.

    Parse with `Parser.parse_run`. first: see `Parser.first`.
    """
    parser.keys, parser.first = cls, first
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
