"""README.md: short, its commands exist, its figures come from the results, its output is real."""

import re
from pathlib import Path

import pytest
from pages.doc_pages import BLOCK
from pages.doc_results import compare
from paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 165  # lines
CODE = re.compile(r"^```.*?^```|`[^`]*`", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"\d[\d.,]*\s?(?:%|s\b|ms\b|times\b|x\b|GPUs\b|requests\b)")


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= LONGEST


def test_every_figure_is_generated() -> None:
    """A measured figure outside a generated block could differ from the results."""
    assert FIGURE.findall(CODE.sub("", BLOCK.sub("", TEXT))) == []


def test_the_chart_says_what_it_shows() -> None:
    for theme in ("light", "dark"):
        drawn = (ROOT / "docs" / "assets" / f"chat-p99-{theme}.svg").read_text(encoding="utf-8")
        assert "simulated H200 GPUs at 80 % load" in drawn
    assert "prefers-color-scheme: dark" in TEXT


def test_it_links_every_table_of_faults_at_least_through_one_page() -> None:
    assert "(docs/reference/faults.md)" in TEXT
    http = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    for page in Path(ROOT / "docs" / "reference").glob("faults*.md"):
        assert f"({page.name})" in http


TARGETS = sorted(set(re.findall(r"(?:^|`)make ([\w-]+)", TEXT, re.MULTILINE)))


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_figures_that_differ_little_are_level() -> None:
    assert compare(10.0, 10.4) == 1.0
    assert compare(10.0, 20.0) == 2.0
    assert compare(None, 20.0) is None
