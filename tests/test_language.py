"""Docstrings and names stay plain: no pattern that readers stumble over."""

import re
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import NamedTuple

import pytest
from paths import ROOT

PACKAGES = ("proxy", "replay", "traces", "analysis")


class Rule(NamedTuple):
    """A pattern of docstrings.

    Attributes:
        pattern: regular expression over the text of a docstring.
        before, after: a sentence with the pattern, and the same sentence in plain words.
    """

    pattern: str
    before: str
    after: str

    def breaks(self, text: str) -> bool:
        return re.search(self.pattern, text, re.MULTILINE | re.IGNORECASE) is not None


RULES = {
    "semicolon in the first paragraph": Rule(
        r"\A[^;\n]*(?:\n(?!\s*\n)[^;\n]*)*;",
        "Return the class; None\n    if there is none.", "Return the class.\n\n    It is; it may."),
    "a beginning that names nothing": Rule(
        r"\A(?-i:Who|Whose|Whom|Of|What|It|Its|Those|They|These|Them|Nobody|Somebody)\b",
        "It waits.", "The queue waits."),
    "`what is` as a noun": Rule(
        r"\bwhat (?:is|was|it|has|they|were|a|the)\b",
        "Send what is left.", "Send the unsent rest."),
    "Return what, whether or how": Rule(
        r"\A(?:Return|Say|Tell) (?:what|whether|how)\b",
        "Return whether it could.", "True if this backend could have served the request."),
    "pronoun `one`": Rule(
        r"\b(?:one that|another one|the (?:first|last|other) one|one of them)\b",
        "Drop the last one.", "Drop the last link."),
    "pronoun `those`": Rule(
        r"\b(?:those (?:that|of|who)|that of)\b",
        "models: those of the backends", "models: served by any backend"),
    "`none` as a noun": Rule(
        r"(?-i:\b(?:if there is none|is none|and none)\b|: none\b)",
        "Bad input if it is none.", "Bad input if it is not a number."),
    "so many, so much, so long": Rule(
        r"\bso (?:many|much|long)\b",
        "Stop after so many steps.", "Stop after `limit` steps."),
    "words of a private dialect": Rule(
        r"(?<!-)\b(?:whoever|whatever|nobody|lately|beside|anew|under way)\b(?!-)",
        "Whoever came first.", "Regardless of arrival order."),
    "an attribute that begins with a preposition": Rule(
        r"^[ \t]+\w+(?:, \w+)*: (?:of|for|from|by|with|in|at|to)\b",
        "Rows.\n\n    turns: of large bodies", "Rows.\n\n    turns: read order of large bodies"),
}  # fmt: skip
NAMES = {"one", "found", "known", "listed", "wanted", "kept", "told", "made", "given", "asked"}
PUBLIC = {("proxy/core/policy/routing.py", "wanted")}  # an attribute that routing rules read
NAME = re.compile(rf"\b(?:{'|'.join(sorted(NAMES))})\b")
TEXT = re.compile(r'"""(.*?)"""', re.DOTALL)


@cache
def sources(package: str) -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def docstrings(package: str) -> list[tuple[str, str]]:
    """Return place and text of each string that stands alone: docstrings, notes on constants."""
    texts = []
    for path, source in sources(package).items():
        line, end = 1, 0
        for text in TEXT.finditer(source):
            start = source.rfind("\n", 0, text.start()) + 1
            line, end = line + source.count("\n", end, text.start()), text.start()
            if not source[start : text.start()].strip(" r"):
                texts.append((f"{path}:{line}", text[1]))
    return texts


def functions_in(code: CodeType) -> Iterator[CodeType]:
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from functions_in(part)


def vague_names_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each local variable or argument in `NAMES`, once for each function."""
    if not NAME.search(TEXT.sub("", source)):
        return  # compiling takes most of the time
    for function in functions_in(compile(source, "module", "exec", dont_inherit=True)):
        for name in NAMES.intersection((*function.co_varnames, *function.co_cellvars)):
            yield function.co_firstlineno, name


@pytest.mark.parametrize("name", RULES)
def test_a_rule_knows_its_pattern(name: str) -> None:
    assert RULES[name].breaks(RULES[name].before)
    assert not RULES[name].breaks(RULES[name].after)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_plain(package: str) -> None:
    texts = docstrings(package)
    assert len(texts) > 400
    assert [
        (place, name) for place, text in texts for name, rule in RULES.items() if rule.breaks(text)
    ] == []


def test_a_vague_name_is_seen() -> None:
    source = "def a(told):\n    return [one for one in told]\ndef b(one):\n    return lambda: one\n"
    assert sorted(name for _, name in vague_names_in(source)) == ["one", "one", "told"]


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_nouns(package: str) -> None:
    assert [
        f"{path}:{line}: {name}"
        for path, source in sources(package).items()
        for line, name in vague_names_in(source)
        if (path, name) not in PUBLIC
    ] == []
