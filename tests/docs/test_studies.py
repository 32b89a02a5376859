"""The page of the studies is made from results, the results from today's code."""

import json
import shlex
from pathlib import Path

import doc_studies as studies
import pytest

from forebay.proxy.cli import main


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
