"""The tables of docs/benchmarks/decisions.md, from results/decisions.json (make docs-figures)."""

import re
from collections.abc import Iterator
from pathlib import Path

from guard_table import FIGURES, NEAR, Entry, Table, gain, read
from result_lines import markdown_table

TABLE = Path(__file__).with_name("results") / "decisions.json"
CELL = re.compile(r"(?P<kind>.+) (?P<load>[\d.]+)x on (?P<engines>\d+)(?P<flag> flag)?")
HEADS = ("in time", "goodput", "chats' p99", "documents' p99", "E2E p50")
assert len(HEADS) == len(FIGURES)
LISTED = (0, 1, 4)  # places of the figures whose every worse cell is shown
LOADS = ("0.8", "1.5", "2")  # load 1 lies between, and is in the result file
# Why a model can be better, by traffic: "Where a model is better" in docs/research/parts.md.
CAUSES = {
    "rag": "balance",
    "conversation": "decoding",
    "unshared 120k": "reserved servers",
    "popular documents": "admission",
    "multi-turn": "balance",
    "fan-out": "decoding",
    "handbook": "decoding",
    "agents": "sessions",
    "reasoning": "balance",
    "chats": "balance",
}

Cells = dict[re.Match[str], Entry]


def decisions() -> str:
    """Return a table that counts, one of requests in time, and one of cells with a better model."""
    cells = {found: entry for found, entry in _cells(read(TABLE))}
    parts = [_summary(cells)]
    for flag, title in (("", "Default flags"), (" flag", "With the flag")):
        chosen = {found: e for found, e in cells.items() if (found["flag"] or "") == flag}
        parts += [f"\n### In time, percent. {title}\n", _in_time(chosen)]
    parts += ["\n### Where a model is better by more than 2 %\n", _worse(cells)]
    return "\n".join(parts)


def _in_time(cells: Cells) -> str:
    rows = []
    fleets: dict[tuple[str, str], dict[str, Entry]] = {}
    for found, entry in cells.items():
        if found["load"] in LOADS:
            fleets.setdefault((found["kind"], found["engines"]), {})[found["load"]] = entry
    for kind in dict.fromkeys(kind for kind, _ in fleets):
        of = {engines: by_load for (name, engines), by_load in fleets.items() if name == kind}
        engines = min(of, key=lambda engines: _least_lead(of[engines]))
        shown = [_value(of[engines][load], 0) if load in of[engines] else "" for load in LOADS]
        rows.append((kind, engines, *shown))
    return markdown_table(("traffic", "engines", *(f"load {load}" for load in LOADS)), rows)


def _least_lead(by_load: dict[str, Entry]) -> float:
    """Return the smallest ratio of the requests in time, Forebay's by the best model's."""
    return min(_ratio(entry, 0) or 1.0 for entry in by_load.values())


def _worse(cells: Cells) -> str:
    rows = []
    for place in LISTED:
        by_kind: dict[str, list[tuple[float, str]]] = {}
        for found, entry in cells.items():
            if (ratio := _ratio(entry, place)) is not None and ratio < NEAR:
                flag = ", flag" if found["flag"] else ""
                values = f"{entry['now'][place]:.3g}, {entry['models'][place]:.3g}"
                text = f"{found['load']}x on {found['engines']}{flag}: {values}"
                by_kind.setdefault(found["kind"], []).append((ratio, text))
        for kind, listed in by_kind.items():
            cells_worst_first = "; ".join(text for _, text in sorted(listed))
            rows.append((HEADS[place], kind, CAUSES[kind], cells_worst_first))
    heads = ("figure", "traffic", "cause", "load and engines, the worst first: Forebay, best model")
    return markdown_table(heads, rows)


def _cells(table: Table) -> Iterator[tuple[re.Match[str], Entry]]:
    for name, entry in table.items():
        found = CELL.fullmatch(name)
        if found is not None and not name.startswith("quick "):
            yield found, entry


def _ratio(entry: Entry, place: int) -> float | None:
    """Return how many times better Forebay's figure is, or None where one is missing."""
    ours, model = entry["now"][place], entry["models"][place]
    return None if ours is None or model is None else gain(place, model, ours)


def _value(entry: Entry, place: int) -> str:
    ours, model = entry["now"][place], entry["models"][place]
    if ours is None or model is None:
        return "-"
    text = f"{ours:.3g}, {model:.3g}"
    return f"**{text}**" if gain(place, model, ours) < NEAR else text


def _summary(cells: Cells) -> str:
    rows = []
    for place, head in enumerate(HEADS):
        ratios = sorted(
            ratio for entry in cells.values() if (ratio := _ratio(entry, place)) is not None
        )
        worse = sum(ratio < NEAR for ratio in ratios)
        better = sum(ratio > 1 / NEAR for ratio in ratios)
        level = len(ratios) - worse - better
        counts = map(str, (len(ratios), better, level, worse))
        rows.append((head, *counts, f"{ratios[len(ratios) // 2]:.2f}"))
    heads = ("cells", "Forebay better by 2 %", "level", "a model better by 2 %", "median ratio")
    return markdown_table(("figure", *heads), rows)
