"""Commands, options and linked files in the README exist."""

import re
import shlex
from importlib import import_module
from typing import Any

import pytest
import typer
from paths import ROOT

from forebay.proxy.cli import COMMANDS

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```\w*\n(.*?)```", TEXT, re.DOTALL))
LINES = sorted(set(re.findall(r"^(forebay [a-z].*?)(?:\s+#.*)?$", BLOCKS, re.MULTILINE)))


def command_of(words: list[str]) -> Any:
    """The command that `words` name, down to its subcommand."""
    module, attribute = COMMANDS[words[0]][0].split(":")
    command: Any = typer.main.get_command(getattr(import_module(module), attribute))
    for word in words[1:]:
        if not hasattr(command, "commands"):
            break
        if command.invoke_without_command and word.startswith("-"):
            break  # `forebay engine` serves, `forebay engine calibrate` is a word of its own
        assert word in command.commands, words
        command = command.commands[word]
    return command


def test_there_are_some() -> None:
    assert len(LINES) >= 5


@pytest.mark.parametrize("line", LINES)
def test_commands_and_options(line: str) -> None:
    words = shlex.split(line)[1:]
    known = {name for parameter in command_of(words).params for name in parameter.opts}
    assert {word for word in words if re.match(r"--?[a-z]", word)} <= known


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", TEXT))))
def test_links(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"^make (\w+)", BLOCKS, re.MULTILINE))))
def test_make_targets(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
