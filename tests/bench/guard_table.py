"""The table of `make guard`: reading, comparing, and keeping figures.

An entry has the figures of the last `--write` (`now`), the best value that each ever had (`best`),
and those of the best router models (`models`, `by`).

The policy is chaotic: arrivals that are 0.1 % slower change the figures of a cell by as much as
NOISE says. So a figure of one cell counts as lost only beyond that, though each loss of 2 % is
printed. The geometric mean over all cells hardly changes by chance, nor do instruction counts.
These are compared with a mark. It rises with each gain and stays at a loss within the limit, so
that many small losses add up to one that counts. `--write` after that lowers the mark.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = list[float | None]
Entry = dict[str, Any]
Table = dict[str, Entry]

FIGURES = ("attainment %", "goodput /s", "chat p99 s", "doc p99 s", "E2E p50 s")
HIGHER = 2  # this many figures are better when higher, the others when lower
# In the places of FIGURES, so that all are better when lower; millions of instructions.
COUNTS = ("", "", "small request", "400 KB body", "1,000 tokens", "10,000 simulated requests")
COUNTED = "M instructions"
MEAN = "mean of all cells"
LOSS = 0.02  # a larger share is printed, and counts where chance changes little
# Exceeded in 1 of 20 cells (documents' and chats' p99: 1 of 10) after arrivals 0.1 % slower.
NOISE = (0.02, 0.06, 0.2, 0.12, 0.05)
# Of COUNTS: the proxy's timers are a tenth of them, of tokens a quarter, and depend on the machine.
COUNT_NOISE = (LOSS, LOSS, 0.03, 0.05, 0.08, LOSS)
NEAR = 0.98  # of the best model: a figure below it is marked


@dataclass(frozen=True, slots=True)
class Loss:
    """A figure that is worse than it was; `matters`: by more than chance explains."""

    text: str
    matters: bool


def gain(figure: int, before: float | None, after: float | None) -> float:
    """Return how many times better a figure became; above 1 is better."""
    if before == after:
        return 1.0
    if before is None or after is None:
        return math.inf if before is None else 0.0
    old, new = (before, after) if figure < HIGHER else (after, before)
    return new / old if old else math.inf


def steady(name: str) -> bool:
    """True if chance changes the entry's figures by little, so that small losses add up."""
    return MEAN in name or name.startswith(COUNTED)


def limits(name: str) -> tuple[float, ...]:
    """Return the share that each figure may lose by chance."""
    if name.startswith(COUNTED):
        return COUNT_NOISE
    return (LOSS,) * len(FIGURES) if steady(name) else NOISE


def mean(listed: Sequence[Figures]) -> Figures:
    """Return the geometric mean of each figure."""
    means: Figures = []
    for values in zip(*listed, strict=True):
        logs = [math.log(max(1e-3, value)) for value in values if value is not None]
        means.append(float(f"{math.exp(sum(logs) / len(logs)):.4g}") if logs else None)
    return means


def losses(table: Table, played: Table) -> Iterator[Loss]:
    """Describe each figure that lost more than LOSS, with before and after."""
    for name, entry in played.items():
        if name not in table:
            continue
        kept = table[name]
        for figure, after in enumerate(entry["now"]):
            before = _old(kept, "mark")[figure]
            change = gain(figure, before, after)
            if change < 1 - LOSS:
                matters = change < 1 - limits(name)[figure]
                text = f"{'LOST' if matters else 'less'}: {name}: {names(name)[figure]} {before} "
                text += f"before, {after} now ({change:.2f}), {kept['best'][figure]} at best"
                yield Loss(text, matters)


def updated(table: Table, played: Table) -> Table:
    """Return the table with the figures of today, and marks and best values moved by them."""
    new = dict(table)
    for name, entry in played.items():
        kept = table.get(name, entry)
        old_best, old_mark = _old(kept, "best"), _old(kept, "mark")
        best = [_better(i, old_best[i], value) for i, value in enumerate(entry["now"])]
        new[name] = {**kept, **entry, "best": best}
        if steady(name):
            new[name]["mark"] = [
                value
                if gain(i, old_mark[i], value) < 1 - limits(name)[i]
                else _better(i, old_mark[i], value)
                for i, value in enumerate(entry["now"])
            ]
    return new


def _old(entry: Entry, key: str) -> Figures:
    """Return these figures of an entry; the current ones if it has no such figures."""
    figures: Figures = entry[key] if key in entry else entry["now"]
    return figures


def _better(figure: int, old: float | None, new: float | None) -> float | None:
    return new if gain(figure, old, new) > 1 else old


def names(entry_name: str) -> tuple[str, ...]:
    return COUNTS if entry_name.startswith(COUNTED) else FIGURES


def shown(name: str, entry: Entry) -> str:
    """Describe the figures of an entry, one a line, beside those of the best models."""
    lines = [name]
    for figure, value in enumerate(entry["now"]):
        if value is None:
            continue
        line = f"    {names(name)[figure]} {value}"
        if "best" in entry:
            line += f", {entry['best'][figure]} at best"
        if "models" in entry:
            model = entry["models"][figure]
            ratio = gain(figure, model, value)
            line += f", {ratio:.2f} of {entry['by'][figure]} {model}{' <' * (ratio < NEAR)}"
        lines.append(line)
    return "\n".join(lines)


def read(path: Path) -> Table:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, table: Table, cells: Sequence[str]) -> None:
    """Write one line per entry, so that a diff shows what changed; drop cells that are no more."""
    listed = [name for name in (*cells, *filter(steady, table)) if name in table]
    lines = (f"{json.dumps(name)}: {json.dumps(table[name])}" for name in listed)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
