"""The pages: links lead somewhere, sentences are plain, answers are two clicks away."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from pages.doc_prose import median_words
from paths import ROOT

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.rglob("*.md")),
]
LONGEST_MEDIAN = 16  # words in a sentence
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^ {0,3}```.*?^ {0,3}```", re.DOTALL | re.MULTILINE)
QUESTIONS = {
    "why 429?": "deadline_unattainable",
    "how do I add a server?": "A new server** is probed first",
    "which vLLM flags?": "--long-prefill-token-threshold 2048",
    "what does p99 count?": "99 of 100 answered requests",
    "why is chat p99 high?": "Is it the queue or the servers?",
    "how do I restart?": "timeouts.lame_duck",
    "how many GPUs?": "forebay size",
    "how do I give a customer a key?": "tenants:\n  keys:",
    "who sees whose cache?": "cache_salt",
    "how many proxies?": "One process is enough for 2 to 8 GPUs",
    "what do clients see when a server dies?": "an error event and a broken connection",
    "which metric first?": "forebay_queue_seconds",
    "is it for me?": "When Forebay does not help",
}
"""What people ask, and words of the answer."""


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", heading).lower().strip().replace(" ", "-") for heading in headings
    }


def links(page: Path) -> list[tuple[Path, str]]:
    """Files and anchors that a page leads to."""
    return [
        ((page.parent / target).resolve() if target else page, anchor)
        for target, anchor in LINK.findall(FENCED.sub("", text_of(page)))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    assert median_words(text_of(page)) <= LONGEST_MEDIAN


def test_no_page_is_a_diary() -> None:
    """Dates belong to results and records; a manual says how things are."""
    dated = re.compile(r"\b20\d\d-\d\d-\d\d\b(?!T)")
    for page in PAGES:
        if page.parent.name not in {"benchmarks", "research"} and page.name != "README.md":
            assert dated.findall(FENCED.sub("", text_of(page))) == [], page


def test_the_site_shows_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    shown = set(re.findall(r"[\w/-]+\.md", str(nav)))
    assert shown == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_answer_is_two_clicks_from_the_index(question: str) -> None:
    near = {DOCS / "index.md"}
    for _ in range(2):
        near |= {target for page in near for target, _ in links(page) if target.suffix == ".md"}
    assert any(QUESTIONS[question] in text_of(page) for page in near)
