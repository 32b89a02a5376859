"""Compare the quality of the policy's decisions with a committed table (make guard).

Virtual time: twelve kinds of traffic (`guard_workloads.py`) at several loads, on two and on eight
engines, with whole and with chunked prefills. A cell of the table is one of these. Its figures are
those of all seeds together:

- attainment: percentage of the requests with the first token in time (`simulate`'s targets: 2 s for
  chats, 15 s for documents). A rejected request is not in time.
- goodput: requests a second with the first token in time and the whole answer by that target plus
  100 ms for each token.
- chats' and documents' p99 of TTFT, and E2E p50: seconds, of the requests that were served.

The table has four values of a figure: `now`, `mark`, `best` and that of the best router model. A
figure is compared with its mark, which rises with each gain and stays at a loss of up to 2 %, so
that small losses add up. `--write` after a larger loss lowers the mark to it. `best` is the best
value ever. Only models with at least 0.98 of the best model's attainment count: a model that
rejects nearly all requests serves the rest fast.

    python tests/bench/guard.py                  compare; the exit status is 1 after a loss
    python tests/bench/guard.py --write          keep the figures of today
    python tests/bench/guard.py --models         play the router models again, too, and keep theirs
    python tests/bench/guard.py --only rag       the cells whose name contains this
    python tests/bench/guard.py --quick          only short cells, as CI does
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from arena_policies import FOREBAY, MODELS, new_policy
from arena_score import CHAT_MOST, quantile
from arena_workloads import ENGINE, Load, Rows
from guard_workloads import KINDS, rows_at_capacity

from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.served import served_engine

TABLE = Path(__file__).with_name("guard.json")
LOADS = (0.8, 1.0, 1.5, 2.0)  # times capacity
SEEDS = 3
QUICK = 400  # requests of a short cell
CHUNK = 2_048  # --long-prefill-token-threshold
TARGET_S = (2.0, 15.0)  # TTFT of chats and of documents: `simulate`'s defaults
TOKEN_S = 0.1  # of the whole answer's target, for each token
NEAR = 0.98  # of the best model's attainment: models below it do not count
FIGURES = ("attainment %", "goodput /s", "chat p99 s", "doc p99 s", "E2E p50 s")
HIGHER = 2  # this many figures are better when higher, the others when lower
LOSS = (0.02, 0.02, 0.02, 0.02, 0.02)  # of each figure; a larger share is reported
Figures = list[float | None]
Entry = dict[str, Any]
Table = dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: a workload, its load as a share of capacity, and the engines."""

    kind: str
    load: float
    engines: int = 2
    chunk: int = 0
    seeds: int = SEEDS
    requests: int = 0  # only so many of the first ones; 0: all

    @property
    def name(self) -> str:
        flag, quick = " flag" * bool(self.chunk), "quick " * bool(self.requests)
        return f"{quick}{self.kind} {self.load:g}x on {self.engines}{flag}"


def all_cells() -> Iterator[Cell]:
    for name, kind in KINDS.items():
        yield Cell(name, 1.5, seeds=1, requests=QUICK)
        for engines in (2, 8) if kind.wide else (2,):
            for chunk in (0, CHUNK) if kind.flag else (0,):
                for load in LOADS:
                    yield Cell(name, load, engines, chunk, SEEDS if engines == 2 else 1)


def play(cell: Cell, policy: str) -> Figures:
    outcomes: list[SimOutcome] = []
    span_s = 0.0
    engine = replace(ENGINE, long_prefill_token_threshold=cell.chunk)
    names = [f"gpu{number}" for number in range(cell.engines)]
    load = Load(cell.kind, lambda seed, data: Rows(), cell.load)
    for seed in range(cell.seeds):
        rows = rows_at_capacity(cell.kind, cell.engines, seed)[: cell.requests or None]
        rows = [replace(row, arrival_s=row.arrival_s / cell.load) for row in rows]
        span_s += rows[-1].arrival_s
        with new_policy(policy, load, engine, names) as chosen:
            fleet = Fleet(chosen, {name: served_engine(engine) for name in names})
            outcomes += fleet.run(rows)
    return figures(outcomes, span_s)


def figures(outcomes: Sequence[SimOutcome], span_s: float) -> Figures:
    """Return the values of FIGURES; None where there is no such request."""
    nan = math.nan
    chat = np.array([o.request.input_tokens <= CHAT_MOST for o in outcomes])
    ttft_s = np.array([nan if o.ttft_s is None else o.ttft_s for o in outcomes])
    e2e_s = np.array(
        [nan if o.finished_s is None else o.finished_s - o.request.arrival_s for o in outcomes]
    )
    output_tokens = np.array([o.request.output_tokens for o in outcomes])
    target_s = np.where(chat, *TARGET_S)
    in_time = ttft_s <= target_s  # False for nan, too
    good = in_time & (e2e_s <= target_s + TOKEN_S * output_tokens)
    served = ~np.isnan(ttft_s)
    values = (
        100 * float(in_time.mean()),
        float(good.sum()) / span_s,
        quantile(ttft_s[served & chat], 0.99),
        quantile(ttft_s[served & ~chat], 0.99),
        quantile(e2e_s[~np.isnan(e2e_s)], 0.5),
    )
    return [None if math.isnan(value) else float(f"{value:.4g}") for value in values]


def best_model(played: dict[str, Figures]) -> tuple[Figures, list[str]]:
    """Return the best value of each figure, and the model that has it."""
    most = max(values[0] or 0.0 for values in played.values())
    near = {name: values for name, values in played.items() if (values[0] or 0.0) >= NEAR * most}
    best: Figures = []
    names = []
    for figure in range(len(FIGURES)):
        name = next(iter(near))
        for other in near:
            if gain(figure, near[name][figure], near[other][figure]) > 1:
                name = other
        best.append(near[name][figure])
        names.append(name)
    return best, names


def gain(figure: int, before: float | None, after: float | None) -> float:
    """Return how many times better a figure became; above 1 is better."""
    if before == after:
        return 1.0
    if before is None or after is None:
        return math.inf if before is None else 0.0
    old, new = (before, after) if figure < HIGHER else (after, before)
    return new / old if old else math.inf


def losses(table: Table, played: Table) -> Iterator[str]:
    """Describe each figure that lost more than LOSS of its mark, with before and after."""
    for name, entry in played.items():
        kept = table.get(name)
        for figure, after in enumerate(entry["now"]):
            before = kept["mark"][figure] if kept else None
            if kept and gain(figure, before, after) < 1 - LOSS[figure]:
                best = kept["best"][figure]
                yield f"{name}: {FIGURES[figure]} {before} before, {after} now, {best} at best"


def updated(table: Table, played: Table) -> Table:
    """Return the table with the figures of today, and marks and best values moved by them."""
    new = dict(table)
    for name, entry in played.items():
        kept = table.get(name, {"mark": entry["now"], "best": entry["now"]})
        marks: Figures = []
        bests: Figures = []
        for figure, after in enumerate(entry["now"]):
            mark, best = kept["mark"][figure], kept["best"][figure]
            change = gain(figure, mark, after)
            marks.append(after if change > 1 or change < 1 - LOSS[figure] else mark)
            bests.append(after if gain(figure, best, after) > 1 else best)
        new[name] = {**kept, **entry, "mark": marks, "best": bests}
    return new


def shown(name: str, entry: Entry) -> str:
    parts = []
    for figure, (value, best) in enumerate(zip(entry["now"], entry["models"], strict=True)):
        if value is not None or best is not None:
            ratio = gain(figure, best, value)
            behind = " <" if ratio < NEAR else ""
            model = entry["by"][figure]
            parts.append(f"{FIGURES[figure]} {value} vs {best} {model} {ratio:.2f}{behind}")
    return f"{name}\n    " + "\n    ".join(parts)


def means(table: Table, key: str) -> str:
    """Describe, of each figure, the geometric mean over all cells of today's over another value."""
    parts = []
    for figure, name in enumerate(FIGURES):
        ratios = [gain(figure, e[key][figure], e["now"][figure]) for e in table.values()]
        logs = [math.log(min(10.0, max(0.1, ratio))) for ratio in ratios]
        parts.append(f"{name.split()[0]} {math.exp(sum(logs) / len(logs)):.3f}")
    return ", ".join(parts)


def read(path: Path) -> Table:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, table: Table) -> None:
    """Write one line per cell, so that a diff shows what changed."""
    order = {cell.name: number for number, cell in enumerate(all_cells())}
    names = sorted((name for name in table if name in order), key=lambda name: order[name])
    lines = (f"{json.dumps(name)}: {json.dumps(table[name])}" for name in names)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def entry_of(cell: Cell, with_models: bool) -> Entry:
    entry: Entry = {"now": play(cell, FOREBAY)}
    if with_models:
        entry["models"], entry["by"] = best_model({name: play(cell, name) for name in MODELS})
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="cells with this in their name")
    parser.add_argument("--quick", action="store_true", help="only short cells")
    parser.add_argument("--write", action="store_true", help="keep the figures of today")
    parser.add_argument("--models", action="store_true", help="play the router models, too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    cells = [
        cell
        for cell in all_cells()
        if options.only in cell.name and (cell.requests or not options.quick)
    ]
    table = read(TABLE)
    with_models = [options.models or cell.name not in table for cell in cells]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        entries = pool.map(entry_of, cells, with_models, chunksize=4)
        played = {cell.name: entry for cell, entry in zip(cells, entries, strict=True)}
    lost = list(losses(table, played))
    new = updated(table, played)
    chosen = {name: new[name] for name in played}
    for name, entry in chosen.items():
        print(shown(name, entry))
    for key, what in (
        ("mark", "of the table"),
        ("best", "of the best ever"),
        ("models", "of models"),
    ):
        print(f"mean gain over all cells, {what}: {means(chosen, key)}")
    if options.write or options.models:
        write(TABLE, new)
    print("\n".join(lost) or "no figure lost more than allowed")
    sys.exit(bool(lost) and not options.write)


if __name__ == "__main__":
    main()
