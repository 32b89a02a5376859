"""The page of load generators is what its data says, and schedules are what they claim."""

import json
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from lean_client import due_times
from load_generators_page import DATA, PAGE, page


def test_the_page_is_made_from_its_data() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(DATA.read_text())), (
        "run tests/bench/replay/load_generators_page.py"
    )


def test_the_lean_client_is_lean() -> None:
    assert (
        len((PAGE.parents[2] / "tests/bench/replay/lean_client.py").read_text().splitlines()) <= 150
    )


def test_schedules_of_the_lean_client() -> None:
    assert due_times(50, 3, False) == pytest.approx([0, 0.02, 0.04])
    times = due_times(100, 4_000, True)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.01, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1, rel=0.05)
