"""The page of commands, made from the help of each."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from typing import Any

import typer

from forebay.proxy.cli import COMMANDS, main


@cache
def cli_pages(examples: bool = True) -> str:
    """The help of every command and subcommand. Options that several share are described once.

    The page leaves the examples out: `--help` has them, and how-to pages have their own.
    """
    helps = {words: _help(*words) for words in _commands()}
    if not examples:
        helps = {words: EXAMPLES.sub("", f"{text}\n") for words, text in helps.items()}
    shared = _shared_options(helps)
    parts = ["## Options of several commands"]
    for title, options in shared.items():
        parts += [f"### {title}", "```text\n" + "\n".join(options.values()) + "\n```"]
    for words, text in helps.items():
        parts += [
            f"##{'#' * (len(words) - 1)} forebay {' '.join(words)}",
            _own(words, text, shared),
        ]
    return "\n\n".join(parts)


Words = tuple[str, ...]
Shared = dict[str, dict[str, str]]  # by title, then by the option's words on one line
OPTION = re.compile(r"^  (?:-|TRACE <|trace <).*\n(?: {8,}\S.*\n)*", re.MULTILINE)
EVERYWHERE = re.compile(
    r"  (?:--help|--quiet|--json\s+print the result as JSON|--force\s+overwrite existing files)"
)
"""Options that the beginning of the page describes."""
EMPTY_GROUP = re.compile(r"^[A-Z][\w ]*:\n(?=\n|\Z)", re.MULTILINE)
PLAIN_USAGE = re.compile(
    r"^Usage: forebay [a-z -]+ \[OPTIONS\](?: COMMAND \[ARGS\]\.\.\.| [^\s{[]*[{[][^\s]*)?\n\n"
)
"""Usage that the list of arguments repeats: at most one argument."""
SUBCOMMANDS = re.compile(r"^Commands:\n(?:  .*\n)*", re.MULTILINE)
EXAMPLES = re.compile(r"^  Examples?:\n\n(?:    .*\n(?:\n(?=    ))?)+\n?", re.MULTILINE)
LEAST_SAVED = 6  # words; a shorter text is repeated in each command
SECTIONS = {
    "engine": "The simulated server", "experiment": "Experiments", "fleet": "Fleet",
    "report": "Reports", "replay": "Traffic and targets", "traces": "Traces", "kv": "KV cache",
}  # fmt: skip
"""Title of the section that has the shared options of a family of commands. The first match
decides."""


def _commands() -> Iterator[Words]:
    for word in COMMANDS:
        yield (word,)
        for name in getattr(command_named(word), "commands", {}):
            yield word, name


def _shared_options(helps: dict[Words, str]) -> Shared:
    """Return the options that several commands describe alike, by the title of their section.

    Of several descriptions of one name, a section has the most frequent.
    """
    holders: dict[str, list[Words]] = {}
    shown: dict[str, str] = {}
    for words, text in helps.items():
        for option in OPTION.findall(f"{text}\n"):
            if not EVERYWHERE.match(option):
                key = " ".join(option.split())
                holders.setdefault(key, []).append(words)
                shown[key] = _aligned(option)
    most: dict[tuple[str, str], tuple[int, str]] = {}
    for key, commands in holders.items():
        saved = (len(commands) - 1) * (len(key.split()) - 1)
        place = (_title(commands), _name(key))
        if place[0] and saved >= max(LEAST_SAVED, most.get(place, (0, ""))[0]):
            most[place] = saved, key
    by_title: Shared = {}
    for (title, _), (_, key) in most.items():
        by_title.setdefault(title, {})[key] = shown[key]
    return by_title


def _aligned(option: str) -> str:
    """Return an option in the columns of a section that joins the help of several commands."""
    name, text = re.split(r" {2,}|\n +|\Z", option.strip(), maxsplit=1)
    lines = textwrap.wrap(text, 50, break_on_hyphens=False, break_long_words=False)
    first = f"  {name:<26}  {lines.pop(0)}" if lines and len(name) <= 26 else f"  {name}"
    return "\n".join([first, *(f"{'':30}{line}" for line in lines)])


def _title(holders: Sequence[Words]) -> str:
    """Return the title of the section for options of these commands, "" for no section."""
    families = {words[0] for words in holders}
    return next((title for word, title in SECTIONS.items() if word in families), "")


def _own(words: Words, text: str, shared: Shared) -> str:
    """Return the help of a command without shared options, and the names of those."""
    found: dict[str, list[str]] = {}

    def kept(match: re.Match[str]) -> str:
        option = " ".join(match[0].split())
        for title, options in shared.items():
            if option in options:
                found.setdefault(title, []).append(option)
                return ""
        return "" if EVERYWHERE.match(match[0]) else match[0]

    text = f"{text}\n"
    if len(words) == 1:  # its subcommands have sections
        text = SUBCOMMANDS.sub("", text)
    own = EMPTY_GROUP.sub("", OPTION.sub(kept, text))
    own = re.sub(r"\n{3,}", "\n\n", PLAIN_USAGE.sub("", own)).strip("\n")
    also = [_also(title, options, shared[title]) for title, options in found.items()]
    return "\n\n".join([f"```text\n{own}\n```", *(["Also " + " ".join(also)] if also else [])])


def _also(title: str, options: Sequence[str], section: Iterable[str]) -> str:
    """Name the options that a command has of a section."""
    missing = [option for option in section if option not in options]
    text = ", ".join(map(_name, options))
    if len(missing) < len(options):
        text = " but ".join(["all", *[", ".join(map(_name, missing))][: len(missing)]])
    return f"[{title}](#{title.lower().replace(' ', '-')}): {text}."


def _name(option: str) -> str:
    return f"`{re.split(r' <|, --| [A-Za-z]', option)[0]}`"


def command_named(word: str) -> Any:
    """The Typer command of a word."""
    module, attribute = COMMANDS[word][0].split(":")
    return typer.main.get_command(getattr(import_module(module), attribute))


def _help(*words: str) -> str:
    with redirect_stdout(StringIO()) as printed:
        main([*words, "--help"])
    return printed.getvalue().strip()
