"""The tables of docs/benchmarks/decisions.md, made from guard.json (make docs-figures)."""

import re
from collections.abc import Iterator
from pathlib import Path

from guard_table import FIGURES, NEAR, Entry, Table, gain, read

TABLE = Path(__file__).with_name("guard.json")
CELL = re.compile(r"(?P<kind>.+) (?P<load>[\d.]+)x on (?P<engines>\d+)(?P<flag> flag)?")
HEADS = ("in time, %", "goodput, /s", "chats' p99, s", "documents' p99, s", "E2E p50, s")
assert len(HEADS) == len(FIGURES)


def decisions() -> str:
    """Return a table for each setting of the flag, and one that counts."""
    cells = {found: entry for found, entry in _cells(read(TABLE))}
    parts = [_summary(cells)]
    for flag, title in (("", "Default flags"), (" flag", "With the flag")):
        parts.append(f"\n### {title}\n")
        parts.append(f"| traffic | load | engines | {' | '.join(HEADS)} |")
        parts.append("| --- | --- | --- | " + " | ".join("---" for _ in HEADS) + " |")
        for found, entry in cells.items():
            if (found["flag"] or "") == flag:
                values = " | ".join(_value(entry, place) for place in range(len(HEADS)))
                parts.append(
                    f"| {found['kind']} | {found['load']} | {found['engines']} | {values} |"
                )
    return "\n".join(parts)


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


def _summary(cells: dict[re.Match[str], Entry]) -> str:
    rows = [
        "| figure | cells | Forebay better by 2 % | level | a model better by 2 % | median ratio |"
    ]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for place, head in enumerate(HEADS):
        ratios = sorted(
            ratio for entry in cells.values() if (ratio := _ratio(entry, place)) is not None
        )
        worse = sum(ratio < NEAR for ratio in ratios)
        better = sum(ratio > 1 / NEAR for ratio in ratios)
        level = len(ratios) - worse - better
        median = ratios[len(ratios) // 2]
        rows.append(
            f"| {head.rpartition(',')[0]} | {len(ratios)} | {better} | {level} | {worse} "
            f"| {median:.2f} |"
        )
    return "\n".join(rows)
