"""`lockstep completion`: print the completion of commands and keys for bash. A shell that has run

    source <(lockstep completion)

completes `lockstep tr<TAB>`, `lockstep data to<TAB>` and `lockstep train training.opt<TAB>`.
"""

from collections.abc import Iterable

from lockstep.commands import COMMANDS
from rl.config.command_line import make_parser
from rl.config.options import flatten
from rl.config.schema import Config

SCRIPT = """\
_lockstep() {{
    local IFS=$'\\n' word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} words
    case "$COMP_CWORD ${{COMP_WORDS[1]}} $before|$word" in
    *" --config|"* | *" =|"* | *"|=") return ;; # files
    "1 "*) words=$'{first} ' ;;
{second}
    *" train "* | *" check "* | *" eval "* | *" plan "* | *" submit "*) words=$'--config \\n{keys}=' ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o nospace -F _lockstep lockstep
"""
SECOND = "    '2 {first} {first}|'*) words=$'{words} ' ;;"


def main(argv: list[str]) -> int:
    """Print the script."""
    make_parser(__doc__).parse_args(argv)
    pairs = [words.split() for words in COMMANDS]
    second = {first: [rest[0] for word, *rest in pairs if word == first and rest] for first, *_ in pairs}
    lines = [SECOND.format(first=first, words=_lines(words, " ")) for first, words in second.items() if words]
    keys = _lines(flatten(Config()), "=")
    print(SCRIPT.format(first=_lines(second, " "), second="\n".join(lines), keys=keys), end="")
    return 0


def _lines(words: Iterable[str], end: str) -> str:
    r"""Return the words for bash's $'...', with `end` and \n between them."""
    return rf"{end}\n".join(words)
