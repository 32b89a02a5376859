"""Words and sentences that readers stumbled over are gone from pages, code and messages."""

import re
from functools import cache
from pathlib import Path

import pytest
from pages.doc_prose import without_code
from paths import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
GLOSSARY = ROOT / "docs" / "explanation" / "glossary.md"
BADLY_SAID = (
    "taken in", "kept clear", "sent lately", "late binding", "honest `retry-after`",
    "the answered", "reckon", "by nobody's", "said and", "told so", "hits before documents",
    "length class of", "turned down", "turned away", "who waits", "who runs",
)  # fmt: skip
"""Home-made words; the glossary has the standard terms."""
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
    "unless that engine is too busy or has had more than its share",
    "what cannot make its deadline: predicted in prefill seconds",
    "the same traffic straight to them and through the proxy",
    "decides when and where each request goes, with `now` passed in",
    "if its prefill alone takes twice that timeout",
    "asked once more on another backend, within a retry budget",
    "what it has not begun to answer goes elsewhere",
    "The policy, in five rules",
    "writes the traffic down as a trace of lengths",
    "A percentile with fewer than ten samples beyond it is not printed",
    "the proxy's own code decides, simulated engines serve, nothing waits",
    "of those of five seeds whose runs were valid",
    "what the engines complete a second when the whole trace is there at once",
    "documents pay for the chats, as an engine that has begun",
    "whose documents then wait 1.85 times as long",
    "a policy of before",
    "sent lately",
    "Refused at once: it would have waited",
    "but only in the place of another",
    "The server cannot answer this request in time. Try again later.",
    "longer than any backend takes",
    "There is no such path here",
    "is on trial: first tokens",
    "configuration unchanged; needs a restart",
    "Not to be relied on",
    "of the requests due",
    "imbalance of prompt tokens",
    "100k tokens cost",
    "displacing",
)
"""Sentences that readers had to read twice, and messages that nobody understood."""


@cache
def plain(path: Path) -> str:
    """The text on one line, in lower case; string literals that Python joins are joined."""
    text = " ".join(path.read_text(encoding="utf-8").split()).lower()
    return re.sub(r'" f?"', "", text) if path.suffix == ".py" else text


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != GLOSSARY],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_standard_terms(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8")).lower()
    assert [words for words in BADLY_SAID if words in text] == []


def test_sentences_that_nobody_understood_are_gone() -> None:
    sources = [
        path
        for folder in ("proxy", "replay", "traces", "analysis")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".html"}
    ]
    assert len(sources) > 200
    for path in [*PAGES, *sources]:
        if path == GLOSSARY:
            continue  # it has the old words beside the new ones
        text = plain(path)
        assert [one for one in GONE if one.lower() in text] == [], path
