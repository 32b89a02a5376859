"""The page of the studies is made from results, the results from today's code."""

import json
import re
import shlex
from pathlib import Path

import doc_studies as studies
import pytest
from paths import ROOT

from forebay.proxy.cli import main

ITEM = re.compile(r"^\| (\d+) \| (.+) \| (.*) \| (.+) \| (.+) \| (.*) \| (\w+) \|$", re.MULTILINE)
VERDICTS = {"works", "corrected", "open", "outside"}


def items() -> list[tuple[str, ...]]:
    return ITEM.findall((ROOT / "docs/research/course.md").read_text(encoding="utf-8"))


def test_the_page_has_every_study_in_the_order_of_the_course() -> None:
    text = studies.PAGE.read_text(encoding="utf-8")
    assert studies.BLOCK.findall(text) == list(studies.ORDER)
    assert list(studies.results()) == [one for one in studies.ORDER if one in studies.results()]


@pytest.mark.parametrize("name", studies.results())
def test_a_block_is_what_the_results_say(name: str) -> None:
    made = f"<!-- generated: study {name} -->\n\n{studies.block(name)}\n\n<!-- end -->"
    assert made in studies.PAGE.read_text(encoding="utf-8"), "make studies"
    assert (studies.PLOTS / f"{name}.svg").read_text(encoding="utf-8").startswith("<svg")


@pytest.mark.parametrize("name", ["memory", "prefill"])
def test_the_results_are_todays(name: str, tmp_path: Path) -> None:
    words = shlex.split(studies.results()[name]["command"])[1:]
    assert main([*words, "--out", str(tmp_path)]) == 0
    today = studies.kept(json.loads((tmp_path / "results.json").read_text(encoding="utf-8")))
    assert today == studies.results()[name], "make studies"


def test_every_item_of_the_course_has_a_verdict_and_no_difference_is_left_unexplained() -> None:
    found = items()
    assert [int(number) for number, *_ in found] == list(range(1, 125))
    for number, *_, why, verdict in found:
        assert verdict in VERDICTS, number
        assert why.strip() or verdict == "works", number


@pytest.mark.parametrize("name", studies.COURSE)
def test_the_course_page_has_the_figures_of_the_studies(name: str) -> None:
    ours = " ".join(here for _, _, _, _, here, *_ in items())
    for line in studies.beside_the_course(name, studies.results()[name]).splitlines()[2:]:
        figure = line.split(" | ")[2]
        assert figure in ours, (line, "docs/research/course.md")
