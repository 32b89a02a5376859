"""The search for the highest load, the figures of a play, and who is compared."""

import json

import headline
import pytest
from headline import Cell, figures, highest_step, loads, play
from pages.doc_results import spread

SHORT = {"beside": 600.0, "shared": 120.0}


@pytest.mark.parametrize("start", [-9, 4, 30])
def test_the_highest_step_is_found_from_both_sides(start: int) -> None:
    assert highest_step(lambda step: step <= 7, start, 4) == 7


@pytest.mark.parametrize("router", ["forebay", "direct", "split"])
def test_every_request_is_counted(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline, "SECONDS", SHORT)
    monkeypatch.setattr(headline, "SEEDS", 2)
    headline.rows_of.cache_clear()
    cell = Cell("beside", "flag")
    found = figures(cell, router, 1.0)
    played = [play(cell, router, 1.0, seed) for seed in range(2)]
    assert found["chats"]["requests"] + found["documents"]["requests"] == sum(map(len, played))
    assert found["chats"]["p99"][0] <= found["chats"]["max"]
    # Thirty documents of a seed are too few for a p90 of it, sixty for one of both.
    assert found["documents"]["p90"] is None
    headline.rows_of.cache_clear()


def test_loads_are_named_by_the_best_other_router() -> None:
    routers = {
        "forebay": {"highest_per_s": [9.0, 8.0, 10.0]},
        "direct": {"highest_per_s": [2.0, 1.0, 3.0]},
        "llm_d": {"highest_per_s": [4.0, 3.0, 5.0]},
    }
    cells = (Cell("beside", "flag"), Cell("beside", "default"), Cell("shared", "default"))
    table = {cell.name: routers for cell in cells}
    assert loads(table, Cell("beside", "default")) == {"50%": 2.0, "80%": 3.2}
    assert loads(table, headline.FLAGGED)[headline.SAME] == 3.2
    assert loads(table, Cell("beside", "class", 4)) == {"50%": 4.0, "80%": 6.4}
    assert loads(table, Cell("shared", "default"))["overload"] == 13.5


def test_a_figure_has_its_range() -> None:
    assert spread([0.123, 0.1, 0.2]) == "0.12 (0.1\u20130.2)"
    assert spread([12.3]) == "12"
    assert spread(None) == "-"


def test_the_committed_figures_are_of_one_policy_and_at_their_loads() -> None:
    table = json.loads(headline.TABLE.read_text(encoding="utf-8"))
    assert set(table) == {cell.name for cell in headline.CELLS}
    assert len({of["forebay"]["commit"] for of in table.values()}) == 1
    for cell in headline.CELLS:
        assert set(table[cell.name]) == set(cell.routers)
        for name, rate_per_s in loads(table, cell).items():
            for of in table[cell.name].values():
                assert of[name]["per_s"] == pytest.approx(rate_per_s, rel=1e-3)
