"""One name for each thing, as the glossary has it: in options, help, messages and pages."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from pages.doc_cli import cli_pages
from pages.doc_prose import prose, without_code
from paths import ROOT

from forebay.traces.ground.command_line.help_text import RENAMED

GLOSSARY = (ROOT / "docs" / "explanation" / "glossary.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in GLOSSARY.splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| term"))
]
NOT_HERE = {
    "class", "recording", "engine (in the proxy)", "service class", "on trial", "refused",
    "length class", "turned away", "taken",
}  # fmt: skip
"""Old names that are ordinary words, or stand in the explanation of the new one."""
OLD = [
    name.strip(" `") for row in ROWS for name in row[2].split(",") if name.strip()
]  # fmt: skip
PAGES = sorted(
    page for page in (ROOT / "docs").rglob("*.md")
    if page.parent.name in {"tutorials", "how-to", "explanation"} and page.name != "glossary.md"
)  # fmt: skip
EVERY_PAGE = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "examples" / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "glossary.md"),
]
BADLY_SAID = (
    "taken in", "kept clear", "sent lately", "late binding", "honest `retry-after`",
    "the answered", "reckon", "by nobody's", "said and", "told so", "hits before documents",
    "length class of", "turned down", "turned away", "who waits", "who runs",
)  # fmt: skip
"""Home-made words, whose standard terms are in the glossary."""


def test_the_glossary_has_each_term_once() -> None:
    assert len(ROWS) >= 40
    assert len(OLD) >= 50
    assert all(len(row) == 3 for row in ROWS)
    assert max(Counter(row[0] for row in ROWS).values()) == 1
    terms = [row[0].strip("`").lower() for row in ROWS]
    assert terms == sorted(terms, key=lambda term: term.lstrip("-"))


@cache
def texts() -> dict[str, str]:
    """Return the help of all commands and the prose of the pages, in small letters."""
    pages = {
        str(page.relative_to(ROOT)): prose(page.read_text(encoding="utf-8")).lower()
        for page in (ROOT / "README.md", *PAGES)
    }
    return {"the help": cli_pages().lower().replace("e.g. by", ""), **pages}


@pytest.mark.parametrize("name", [name for name in OLD if name not in NOT_HERE])
def test_an_old_name_is_nowhere(name: str) -> None:
    old = re.compile(rf"(?<![\w-]){re.escape(name.lower())}(?![\w-])")
    assert not [place for place, text in texts().items() if old.search(text)]


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: str(page.relative_to(ROOT)))
def test_standard_terms(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8")).lower()
    assert [words for words in BADLY_SAID if words in text] == []


@pytest.mark.parametrize("old", RENAMED)
def test_a_renamed_option_has_one_name_in_the_help(old: str) -> None:
    assert old in OLD or old == "--length"
    shown = re.findall(rf"{old}(?![\w-])", cli_pages())
    assert shown == []


def test_an_old_name_of_an_option_still_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay.proxy.cli import main

    words = ["traces", "synth", "chat-beside-documents", "--duration", "1m", "--output"]
    assert main([*words, str(tmp_path / "a.jsonl")]) == 0
    assert (tmp_path / "a.jsonl").exists()
    assert main(["kv", "--model", "llama-3-8b", "--gpu", "h200", "--length=8192", "--json"]) == 0
    assert '"8192"' in (out := capsys.readouterr().out) or "8192" in out


def test_times_have_one_grammar() -> None:
    """Every option in seconds also takes `3m`."""
    bare = re.findall(r"--(\w*(?:duration|timeout)) <(?:float|int)>", cli_pages())
    assert set(bare) <= {"shutdown-timeout", "start-timeout"} | set()
