"""The tables of the HTML page: the rows of `arena_tables`, cut to what fits a page's width."""

from collections.abc import Sequence
from html import escape

from arena_results import Comparison, Entry
from arena_tables import BEST_HEADS, HEADS, best_cells, cells_of

from forebay.analysis.statistics.units import NONE

# All columns together are twice as wide as the page, and goodput would be out of sight.
SERVED_FROM = HEADS.index("goodput /s")


def served_table(entries: Sequence[Entry]) -> str:
    """Served and rejected requests, one row a router; or the reason why a run does not count."""
    width = len(_served(HEADS))
    rows = []
    for entry in entries:
        cells = cells_of(entry)
        rows.append(_row(_served(cells)) if entry.valid else _reason(cells, width))
    return _table(_served(HEADS), rows)


def latency_table(entries: Sequence[Entry]) -> str:
    """Latencies of the routers that have any."""
    rows = [_row(_latency(cells_of(entry))) for entry in entries if entry.valid]
    return _table(_latency(HEADS), rows) if rows else ""


def best_table(found: Sequence[Comparison]) -> str:
    """Ours against the best peer, workload by workload."""
    rows, workload = [], ""
    for one in found:
        cells = best_cells(one)
        if cells[0] != workload:
            workload, width = cells[0], len(cells) - 1
            name = f"<th class='section' colspan='{width}'>{escape(workload)}</th>"
            rows.append(f"<tr>{name}</tr>")
        rows.append(_row(cells[1:]))
    return _table(BEST_HEADS[1:], rows) if rows else ""


def _served(cells: Sequence[str]) -> list[str]:
    return [*cells[:2], *cells[SERVED_FROM:]]


def _latency(cells: Sequence[str]) -> list[str]:
    return [cells[0], *cells[2:SERVED_FROM]]


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    named = "".join(
        f"<th class='{'n name' if ' ' in cell else 'n'}'>{escape(cell)}</th>" for cell in heads[1:]
    )
    return (
        f"<div class='scroll'><table><thead><tr><th>{escape(heads[0])}</th>{named}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(cells: Sequence[str]) -> str:
    return f"<tr><th>{escape(cells[0])}</th>{''.join(map(_cell, cells[1:]))}</tr>"


def _cell(cell: str) -> str:
    """A number does not break into lines; a reason does, between the words of its name too."""
    if ": " not in cell:
        return f"<td class='n'>{escape(cell)}</td>"
    return f"<td>{escape(cell).replace('_', '_<wbr>')}</td>"


def _reason(cells: Sequence[str], width: int) -> str:
    """A router without figures: name, no seeds, and why over all that is left."""
    name, seeds, why, *rest = cells
    assert all(cell == NONE for cell in rest), cells
    return (
        f"<tr><th>{escape(name)}</th><td class='n'>{escape(seeds)}</td>"
        f"<td colspan='{width - 2}'>{escape(why)}</td></tr>"
    )
