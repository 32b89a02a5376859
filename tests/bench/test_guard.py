"""The comparison of `make guard`, and its committed table."""

from pathlib import Path

import pytest
from guard import TABLE, all_cells, best_model
from guard_table import (
    COUNTED,
    FIGURES,
    MEAN,
    Figures,
    Table,
    gain,
    losses,
    mean,
    read,
    steady,
    updated,
    write,
)
from guard_workloads import KINDS

CELL = "chats 2x on 2"
GOOD: Figures = [90.0, 10.0, 1.0, None, 5.0]


def table_of(name: str, now: Figures) -> Table:
    return updated({}, {name: {"now": now}})


def changed(figure: int, value: float | None) -> Figures:
    return [value if number == figure else old for number, old in enumerate(GOOD)]


@pytest.mark.parametrize(
    ("figure", "value", "lost", "matters"),
    [
        (0, 89.0, False, False),
        (0, 87.0, True, True),
        (1, 9.7, True, False),  # by chance, perhaps
        (1, 9.0, True, True),
        (2, 1.1, True, False),
        (2, 1.5, True, True),
        (4, 4.0, False, False),
        (4, None, True, True),  # no request was served
    ],
)
def test_a_loss_beyond_chance_matters(
    figure: int, value: float | None, lost: bool, matters: bool
) -> None:
    found = list(losses(table_of(CELL, GOOD), {CELL: {"now": changed(figure, value)}}))
    assert len(found) == lost
    assert any(loss.matters for loss in found) == matters
    for loss in found:
        assert f"{CELL}: {FIGURES[figure]} {GOOD[figure]} before, {value} now" in loss.text


def test_a_new_cell_loses_nothing() -> None:
    assert not list(losses({}, {CELL: {"now": GOOD}}))


@pytest.mark.parametrize("name", [MEAN, f"{COUNTED}, Python"])
def test_small_losses_add_up_in_steady_entries(name: str) -> None:
    table = table_of(name, [None, None, 1.0])
    for value, counts in ((1.015, False), (1.05, True)):
        played: Table = {name: {"now": [None, None, value]}}
        assert any(loss.matters for loss in losses(table, played)) == counts
        table = updated(table, played)
    assert table[name]["now"] == table[name]["mark"] == [None, None, 1.05]  # it is accepted
    assert table[name]["best"] == [None, None, 1.0]
    assert not list(losses(table, {name: {"now": [None, None, 1.05]}}))


def test_a_gain_raises_mark_and_best_value() -> None:
    table = updated(table_of(MEAN, GOOD), {MEAN: {"now": changed(1, 11.0)}})
    assert table[MEAN]["mark"][1] == table[MEAN]["best"][1] == 11.0


def test_an_update_keeps_models_and_other_cells() -> None:
    table: Table = table_of("other", GOOD) | updated(
        {}, {CELL: {"now": GOOD, "models": GOOD, "by": ["lmetric"] * 5}}
    )
    new = updated(table, {CELL: {"now": changed(0, 50.0)}})
    assert new["other"] == table["other"]
    assert new[CELL]["by"] == ["lmetric"] * 5
    assert new[CELL]["best"] == GOOD


def test_gain_is_above_one_when_a_figure_is_better() -> None:
    assert gain(0, 50.0, 100.0) == gain(2, 2.0, 1.0) == 2.0
    assert gain(3, None, None) == 1.0


def test_a_model_that_rejects_nearly_all_is_not_the_best() -> None:
    best, by = best_model(
        {"fast": [10.0, 1.0, 0.1, None, 0.1], "fair": [80.0, 8.0, 1.0, None, 3.0]}
    )
    assert best == [80.0, 8.0, 1.0, None, 3.0]
    assert by == ["fair"] * 5


def test_the_mean_is_geometric_and_leaves_out_what_a_cell_does_not_have() -> None:
    assert mean([[1.0, None, None], [4.0, 3.0, None]]) == [2.0, 3.0, None]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = table_of(CELL, GOOD) | table_of(MEAN, GOOD)
    write(tmp_path / "guard.json", table | table_of("no such cell", GOOD), [CELL])
    assert read(tmp_path / "guard.json") == table


def test_the_committed_table_has_every_cell() -> None:
    cells = {cell.name for cell in all_cells()}
    assert {name for name in read(TABLE) if not steady(name)} == cells
    assert TABLE.stat().st_size < 60_000


@pytest.mark.parametrize("name", KINDS)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    kind = KINDS[name]
    first, second = (
        [row for row, _ in zip(kind.make(0, 1), range(200), strict=False)] for _ in "ab"
    )
    assert first == second
    assert len(first) == 200
    assert len({row.id for row in first}) == 200
