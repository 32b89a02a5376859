"""The pages: links lead somewhere, sentences are plain, answers are two clicks away."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from doc_prose import median_words, prose
from paths import ROOT

DOCS = ROOT / "docs"
ALL = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.rglob("*.md")),
]
RAW = {"bench-routers.md", "bench-policies.md", "bench-fleets.md", "router-cost.md"}
PAGES = [
    page for page in ALL if page.parent.name != "research" and page.name not in RAW
]  # research and raw results are records: the rules of style are for documentation
LONGEST_MEDIAN = 16  # words in a sentence
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^ {0,3}```.*?^ {0,3}```", re.DOTALL | re.MULTILINE)
BADLY_SAID = (
    "taken in", "kept clear", "in turn", "sent lately", "late binding", "honest `Retry-After`",
    "the answered", "reckon", "by nobody's", "said and", "told so", "hits before documents",
    "length class of", "turned down", "who waits", "who runs",
)  # fmt: skip
"""Home-made words that readers stumbled over; the glossary has the standard terms."""
GONE = (
    "Forebay is the pool in front of vLLM",
    "each pays that prefill again on the wrong GPU",
    "keeps one engine clear of long prefills",
    "leaves streams untouched, byte for byte",
    "The live proxy carries them out on sockets",
    "the proxy takes each in as it comes up",
    "Flags win over the environment (",
    "with which shorter prefills pass a long one inside the engine",
    "no chat in the simulator comes late",
    "of which the engine keeps each in its prefix cache",
    "out, then one trial at a time; the last one is never put out",
    "then broken framing: never a clean end",
    "out of the queue in the same loop turn",
    "streams run out up to `drain`",
    "so that nobody can time what others asked",
    "each tells the others ten times a second what it has under way",
    "refusals judged in hindsight are metrics",
    "both can also be replayed and described as they are",
    "A trace says which blocks of its prompts are equal",
    "a run that met warm caches says so",
    "`t_int` of a schedule",
    "says what binds",
    "what the usual formulas would have said",
    "The worst stall is the engine's own",
    "documents longer than a chat's patience use one engine less",
    "its backend was busy with what it had been sent",
    "others were in front of it",
    "this was the last engine clear of long prefills",
    "it would have been in time, at nobody's expense",
    "it is taken in when it is",
    "the old one stays: ",
    "Of those, without a first token",
    "Answers that said it",
    "Cached, as answers said",
    "Point at the plot to read it off",
    "Print data instead of talk",
    "divides time, drops nothing",
    "most requests at once; waiting for it is measured",
    "and shows it in full",
    "print what is in force, secrets masked",
    "within the noise (95 %",
)
"""Sentences that readers had to read twice, and messages that nobody understood."""
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
    return {re.sub(r"[^\w -]", "", one).lower().strip().replace(" ", "-") for one in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """Files and anchors that a page leads to."""
    return [
        ((page.parent / target).resolve() if target else page, anchor)
        for target, anchor in LINK.findall(FENCED.sub("", text_of(page)))
    ]


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    assert median_words(text_of(page)) <= LONGEST_MEDIAN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_standard_terms(page: Path) -> None:
    if page.name != "glossary.md":
        told = prose(text_of(page)).lower()
        assert [words for words in BADLY_SAID if words in told] == []


def test_sentences_that_nobody_understood_are_gone() -> None:
    sources = [
        path
        for folder in ("proxy", "replay", "traces", "analysis")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".html"}
    ]
    for path in [*ALL, *sources]:
        text = " ".join(path.read_text(encoding="utf-8").split())
        assert [sentence for sentence in GONE if sentence in text] == [], path


def test_no_page_is_a_diary() -> None:
    """Dates belong to results and records; a manual says how things are."""
    dated = re.compile(r"\b20\d\d-\d\d-\d\d\b(?!T)")
    for page in PAGES:
        if page.parent.name != "benchmarks" and page.name != "README.md":
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
