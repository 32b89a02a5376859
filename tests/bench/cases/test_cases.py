"""The cases of other projects: their requests, their figures, and the page about them."""

import re
from itertools import pairwise
from random import Random

import pytest
from case_list import CASES, Case
from case_traces import BLOCK, Prompts, arrivals, fixed, lognormal
from cases import cells, missing, rounded
from cases_page import CELL, FIGURES, NAMES, read
from paths import BENCHMARKS
from play import FOREBAY, POLICIES, Figures, figures, play

from forebay.traces.edit.sharing import IdealCache

ROW = re.compile(r"^- \*\*(\S+)\*\*.* Capacity ([\d.]+)\.$", re.MULTILINE)


@pytest.mark.parametrize("name", CASES)
def test_requests_are_those_of_the_seed_and_fit_the_model(name: str) -> None:
    case = CASES[name]
    if case.missing:
        pytest.skip(f"no {case.needs}")
    rows = case.make([(60.0, 3.0)], 1)
    assert rows == case.make([(60.0, 3.0)], 1) != case.make([(60.0, 3.0)], 2)
    assert len({row.id for row in rows}) == len(rows) > 20
    assert all(row.arrival_s <= later.arrival_s for row, later in pairwise(rows))
    context = case.engine().context
    for row in rows:
        assert row.input_tokens + row.output_tokens <= context
        assert row.blocks is not None
        assert len(row.blocks) == -(-row.input_tokens // row.block_tokens)
        assert row.block_tokens <= BLOCK or name == "conversation"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("b2b-saas", 0.6, 0.84), ("tiered", 0.35, 0.99), ("priorities", 0, 0), ("rag-8k", 0.18, 0.21),
     ("mix-c", 0.3, 0.9), ("code-gen", 0.3, 0.9)],
)  # fmt: skip
def test_prompts_share_what_they_should(name: str, least: float, most: float) -> None:
    case = CASES[name]
    cache = IdealCache()
    rows = case.make([(100.0, 6.0)], 0)
    shared = sum(cache.look_up(row).hit_tokens for row in rows)
    assert least <= shared / sum(row.input_tokens for row in rows) <= most


def test_a_turn_has_its_last_prompt_but_not_its_last_answer() -> None:
    rows = {row.id: row for row in CASES["mix-c"].make([(100.0, 3.0)], 0)}
    turns = [(row, rows[row.parent]) for row in rows.values() if row.parent is not None]
    assert len(turns) > 50
    for row, before in turns:
        whole = before.input_tokens // BLOCK
        assert row.blocks is not None
        assert before.blocks is not None
        assert row.blocks[:whole] == before.blocks[:whole]
        assert row.input_tokens > before.input_tokens + before.output_tokens
        assert set(row.blocks[whole:]).isdisjoint(before.blocks)


def test_pieces_come_one_after_the_other() -> None:
    times = list(arrivals([(100.0, 1.0), (100.0, 10.0)], Random(0), before_s=50.0))
    assert times == sorted(times)
    assert 30 < sum(at_s < 0 for at_s in times) < 70
    assert 70 < sum(0 <= at_s < 100 for at_s in times) < 130
    assert 900 < sum(at_s >= 100 for at_s in times) < 1_100
    assert times[-1] < 200


def test_a_lognormal_has_its_mean() -> None:
    dice = Random(0)
    draw = lognormal(300, 0.5)
    assert sum(draw(dice) for _ in range(20_000)) / 20_000 == pytest.approx(300, rel=0.02)


SMALL = Case(
    make=Prompts(own=fixed(6_000), answer=fixed(50)),
    engine=CASES["rag-8k"].engine, engines=2, capacity=5.0,
)  # fmt: skip


@pytest.mark.parametrize("policy", [FOREBAY, "direct", "split", "llm_d"])
def test_figures_of_a_light_load(policy: str) -> None:
    found = figures(SMALL, play(SMALL, policy, [(30.0, 1.0)], 0))
    assert (found.in_time, found.refused, found.admitted_late, found.hits) == (100.0, 0, 0, 0)
    assert 0.1 < found.ttft_p50_s <= found.ttft_p90_s <= found.ttft_p99_s < 2.0
    assert found.e2e_p50_s == pytest.approx(found.ttft_p50_s + 0.049 * found.tpot_ms, rel=0.1)


def test_a_refusal_is_not_in_time_and_late_after_a_moment() -> None:
    found = figures(SMALL, play(SMALL, FOREBAY, [(60.0, 40.0)], 0, max_wait_s=5.0))
    assert found.refused > 20
    assert found.in_time <= 100 - found.refused
    assert found.refused_late <= found.refused
    assert found.ttft_p99_s < 15


def test_what_is_there_is_not_played_again() -> None:
    cell = next(iter(cells()))
    table = {f"{cell.name} {policy}": {"0": ["abc", [1, 50.0]]} for policy in POLICIES}
    table[f"{cell.name} llm_d"] = {"0": ["abc", [1, 70.0]]}
    assert not missing(table, "llm_d", cell, 0, "def")
    assert missing(table, "llm_d", cell, 1, "def")
    assert not missing(table, "dynamo", cell, 1, "def")  # far behind the best model
    assert missing(table, "direct", cell, 1, "def")
    assert missing(table, FOREBAY, cell, 0, "def")
    assert not missing(table, FOREBAY, cell, 0, "abc")
    assert missing({}, "dynamo", cell, 0, "def")


def test_the_kept_figures_have_the_names_of_the_page() -> None:
    assert tuple(Figures.__dataclass_fields__) == FIGURES
    assert set(POLICIES) - {FOREBAY} == set(NAMES)
    nothing = Figures(*[0] * 7, *[float("nan")] * 7)
    assert rounded(nothing)[-1] is None


def test_the_page_names_each_case_with_its_capacity() -> None:
    text = (BENCHMARKS / "cases.md").read_text(encoding="utf-8")
    shown = {name: float(value) for name, value in ROW.findall(text) if name in CASES}
    assert shown == {name: case.capacity for name, case in CASES.items() if not case.waits}


def test_the_kept_cells_are_cells() -> None:
    names = {(cell.case, cell.load, cell.flag) for cell in cells()}
    assert {(cell.case, cell.load, cell.flag) for cell in read()} <= names
    assert CELL.fullmatch("b2b-saas 0.95 flag llm_d")
