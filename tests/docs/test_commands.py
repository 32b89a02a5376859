"""Commands in README.md and docs/: they exist, with the options that they are given."""

import re
import shlex
from pathlib import Path

import pytest
from pages.doc_cli import command_named
from paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^ {0,3}```(\w*)\n(.*?)^ {0,3}```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\$ )?(forebay [a-z].*?)(?:\s+#.*| &)?$", re.MULTILINE)
IN_TEXT = re.compile(r"`(forebay [a-z][^`\n]*)`")


def commands() -> set[str]:
    """Every command line in a code block, and in the text of README.md."""
    found: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name == "README.md":
            found.update(IN_TEXT.findall(text))
        for language, block in FENCED.findall(text):
            if language != "text" and "NAME" not in block:
                found.update(COMMAND.findall(block.replace("\\\n", " ")))
    return found


def test_there_are_many() -> None:
    assert len(commands()) >= 40


@pytest.mark.parametrize("line", sorted(commands()))
def test_a_command_exists(line: str) -> None:
    words = shlex.split(line.partition(">>")[0])[1:]
    command = command_named(words[0])
    for word in words[1:]:
        if not hasattr(command, "commands"):
            break
        if command.invoke_without_command and word.startswith("-"):
            break  # `forebay engine` serves, `forebay engine fit` is a word of its own
        assert word in command.commands, words
        command = command.commands[word]
    known = {name for parameter in command.params for name in parameter.opts}
    ours = words[: words.index("--")] if "--" in words else words
    given = {word.partition("=")[0] for word in ours if re.match(r"--?[a-z]", word)}
    assert given - {"--help"} <= known | {"--quiet"}
    if given and "--help" not in given:  # else the text only names the command
        needed = (p for p in command.params if p.required and p.opts[0].startswith("-"))
        assert [option.opts for option in needed if not given & {*option.opts}] == []


def test_a_simulated_server_of_the_pages_starts() -> None:
    """README.md left `--model` out."""
    servers = [line for line in commands() if re.match(r"forebay engine .*--port", line)]
    assert len(servers) >= 4
    assert [line for line in servers if "--model " not in line] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets(page: Path) -> None:
    """Commands at the beginning of a line, and commands in backticks."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = re.findall(r"(?:^|`)make ([\w-]+)[`\s]", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_every_option_is_on_the_page_of_commands() -> None:
    """In the command's own section, or in a section that it names."""
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = dict(
        part.split("\n", 1) for part in re.split(r"^##+ ", page, flags=re.MULTILINE)[1:]
    )
    assert len(sections) > 40
    everywhere = {"--help", "--quiet", "--json", "--force"}
    beginning = page.partition("<!-- generated")[0]
    assert [option for option in everywhere if f"`{option}`" not in beginning] == []
    for title, text in sections.items():
        if not title.startswith("forebay "):
            continue
        command = command_named(title.split()[1])
        for word in title.split()[2:]:
            command = command.commands[word]
        also = re.findall(r"\]\(#([\w-]+)\)", text)
        texts = [text, *(sections[name] for name in sections if _anchor(name) in also)]
        seen = (p for p in command.params if not getattr(p, "hidden", False))
        names = {name for parameter in seen for name in parameter.opts[:1]}
        options = {name for name in names if name.startswith("-")} - everywhere
        shown = " ".join(texts).replace("[no-]", "")
        assert [name for name in sorted(options) if not re.search(rf"{name}\b", shown)] == [], title


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")
