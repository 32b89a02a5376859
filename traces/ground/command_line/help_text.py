"""Print `--help` as plain text: no boxes, no colours, no shortened options.

Rich's tables cut long option names at 80 columns, so that no user can learn them, and swallow text
in brackets. A paragraph with an indented line, such as an example, is printed unchanged. A command
with many options has headings for them.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer._click import Command, Context, HelpFormatter  # Typer bundles Click
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from forebay.traces.ground.command_line.messages import be_quiet

EXAMPLE = re.compile(r"[Ee]xample: *(forebay .*)")
QUIET = "--quiet"
RENAMED = {"--output": "--out", "--seconds": "--duration", "--length": "--lengths"}
"""{old name: present name} of renamed options. Old names work and are not shown."""
NAME_WIDTH = 26  # a longer option name has a line of its own
LAST = ("Output", "Options")  # headings that come after all others


class _Plain(Command):
    """The help of commands and of groups of commands.

    Attributes:
        headings: {Python name of an option: heading}, for options that are not under `Options`.
    """

    headings: Mapping[str, str] = {}

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _renamed(self, _take_quiet(self, args)))

    def format_help_text(self, ctx: Context, formatter: HelpFormatter) -> None:
        _write_text(self.help, formatter)

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        _write_options(self, ctx, formatter)


class PlainCommand(_Plain, TyperCommand):
    """A command with plain help."""


class PlainGroup(_Plain, TyperGroup):
    """A command with sub-commands and plain help, like `PlainCommand`."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                first = inspect.cleandoc(command.help or "").partition("\n\n")[0]
                rows.append((name, " ".join(first.split())))
        _write_rows("Commands", rows, formatter)


class PlainTyper(typer.Typer):
    """A Typer app whose commands have plain help."""

    def __init__(self, headings: Mapping[str, str] | None = None, **options: Any) -> None:
        """`headings`: for the help of the app's own options: {heading: names of options}."""
        group = type("PlainGroup", (PlainGroup,), {"headings": _by_option(headings or {})})
        quiet = {"add_completion": False, "pretty_exceptions_enable": False}
        super().__init__(cls=group, rich_markup_mode=None, **{**quiet, **options})

    def command(
        self, name: str | None = None, headings: Mapping[str, str] | None = None, **options: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command like Typer, with `headings`: {heading: names of options}."""
        command = type("PlainCommand", (PlainCommand,), {"headings": _by_option(headings or {})})
        return super().command(name, cls=command, **options)


def _take_quiet(command: Command, args: list[str]) -> list[str]:
    """Obey `--quiet`, which every command has, and return the other arguments."""
    ours = args[: args.index("--")] if "--" in args else args
    if QUIET not in ours or any(QUIET in param.opts for param in command.params):
        return args
    be_quiet(True)
    at = ours.index(QUIET)
    return [*args[:at], *args[at + 1 :]]


def _renamed(command: Command, args: list[str]) -> list[str]:
    """Return the arguments with the present names of renamed options."""
    names = {name for param in command.params for name in param.opts}
    words: list[str] = []
    for at, word in enumerate(args):
        if word == "--":
            return [*words, *args[at:]]
        name, equals, value = word.partition("=")
        now = RENAMED.get(name)
        words.append(f"{now}{equals}{value}" if now in names and name not in names else word)
    return words


def _by_option(headings: Mapping[str, str]) -> dict[str, str]:
    return {name: heading for heading, names in headings.items() for name in names.split()}


def _write_text(text: str | None, formatter: HelpFormatter) -> None:
    text = inspect.cleandoc(text or "").replace("\b\n", "")  # Click's mark
    width = formatter.width - 2
    for paragraph in re.split(r"\n\n+", text):
        lines = paragraph.splitlines()
        words = " ".join(paragraph.split())
        if example := EXAMPLE.fullmatch(words):
            lines = ["Example:", "", *_command_lines(example.group(1), width)]
        elif words.startswith("forebay "):
            commands = re.split(r"\n(?=\s*forebay )", paragraph)
            lines = [
                line
                for command in commands
                for line in _command_lines(" ".join(command.split()), width)
            ]
        elif not any(line.startswith("  ") for line in lines):
            lines = _wrapped(words, width)
        formatter.write("\n" + "".join(f"  {line}".rstrip() + "\n" for line in lines))


def _command_lines(command: str, width: int) -> list[str]:
    """Break a command before options, with backslashes, so that it can be pasted."""
    lines = ["  "]
    for part in re.split(r" (?=-)", command):
        if len(lines[-1]) + len(part) + 3 > width:
            lines[-1] += "\\"
            lines.append("      ")
        lines[-1] += f"{part} "
    return [line.rstrip() for line in lines]


def _write_options(command: _Plain, ctx: Context, formatter: HelpFormatter) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    order = list(command.headings)  # of the headings and their options, as the command gives them
    params = command.get_params(ctx)
    params.sort(key=lambda param: order.index(_name(param)) if _name(param) in order else -1)
    for param in params:
        record = param.get_help_record(ctx)
        if record is None:
            continue
        if "--help" in param.opts and not any(QUIET in p.opts for p in command.params):
            sections["Options"].append((QUIET, "Print results, warnings and errors only."))
        heading = command.headings.get(_name(param), "Options")
        if param.param_type_name == "argument":
            heading = "Arguments"
        sections.setdefault(heading, []).append(_row(*record, param))
    first = [heading for heading in sections if heading not in LAST]
    for heading in (*first, *LAST):
        _write_rows(heading, sections.get(heading, []), formatter)


def _name(param: Any) -> str:
    """Return the name of an option, as headings list it."""
    name: str = max(param.opts, key=len)
    return name.removeprefix("--")


def _row(name: str, text: str, param: Any) -> tuple[str, str]:
    """Return the name and the text of an option, in fewer words than Click does."""
    name = re.sub(r"<list\[(\w+)\]>", r"<\1> (repeatable)", name)
    name = re.sub(r"<(int|float) range>", r"<\1>", name)
    text = re.sub(r"  \[x>=[01](\.0)?\]|; x>=[01](\.0)?(?=\])", "", text)  # obvious bounds
    if param.secondary_opts:
        positive, negative = param.opts[0], param.secondary_opts[0]
        name = f"--[no-]{positive.removeprefix('--')}"
        text = text.replace(f"[default: {negative.removeprefix('--')}]", "[default: off]")
        text = text.replace(f"[default: {positive.removeprefix('--')}]", "[default: on]")
    return name, text


def _write_rows(heading: str, rows: list[tuple[str, str]], formatter: HelpFormatter) -> None:
    if not rows:
        return
    formatter.write(f"\n{heading}:\n")
    width = min(NAME_WIDTH, max(len(name) for name, _ in rows))
    for name, text in rows:
        lines = _wrapped(text, formatter.width - width - 4) or [""]
        if len(name) > width:
            formatter.write(f"  {name}\n")
        else:
            formatter.write(f"  {name:<{width}}  {lines.pop(0)}".rstrip() + "\n")
        formatter.write("".join(f"{'':{width + 4}}{line}\n" for line in lines))


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines, never within a word such as --max-num-seqs."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
