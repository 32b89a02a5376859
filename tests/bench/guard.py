"""Compare the quality of the policy's decisions with a committed table (make guard).

Virtual time: twelve kinds of traffic (`guard_workloads.py`) at several loads, on two to sixteen
engines, with whole and with chunked prefills, and four cases by which other projects measure their
routers (`cases/`). A cell of the table is one of these. The means are of the twelve kinds. Figures
are those of all seeds together:

- attainment: percentage of the requests with the first token in time (`simulate`'s targets: 2 s for
  chats, 15 s for documents). A rejected request is not in time.
- goodput: requests a second with the first token in time and the whole answer by that target plus
  100 ms for each token.
- chats' and documents' p99 of TTFT, and E2E p50: seconds, of the requests that were served.

Besides, it counts instructions of the proxy and of the simulator (`guard_counts.py`).
`guard_table.py` says how figures are compared. Beside Forebay's stands the best of the router
models, of those with at least 0.98 of the best model's attainment: a model that rejects nearly all
requests serves the rest fast.

    python tests/bench/guard.py                  compare; the exit status is 1 after a loss
    python tests/bench/guard.py --write          keep the figures of today
    python tests/bench/guard.py --models         play the router models again, too, and keep theirs
    python tests/bench/guard.py --only rag       the cells whose name contains this
    python tests/bench/guard.py --quick          only short cells, as CI does
    python tests/bench/guard.py --seeds 6        the page's figures, in results/decisions.json

With --seeds, all cells of the page are played. Where the committed table has a cell, only those
router models are played that are the best in a figure there: the table knows all models. In other
cells all are played. Their figures are kept, too.
"""

import argparse
import math
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().with_name("cases")))

import numpy as np
from case_list import CASES
from guard_counts import INTERPRETER, available, counts
from guard_table import (
    COUNTED,
    FIGURES,
    MEAN,
    NEAR,
    Entry,
    Figures,
    Table,
    gain,
    losses,
    mean,
    read,
    shown,
    updated,
    write,
)
from guard_workloads import ENGINE, KINDS, Rows, rows_at_capacity
from numpy.typing import NDArray
from paths import RESULTS

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.routers.models import ROUTER_MODELS
from forebay.replay.sim.scenario import DIRECT, Scenario

FOREBAY = "forebay"
MODELS = {DIRECT: "model of round-robin (nginx, plain)"} | {
    name: what for name, (_, what) in ROUTER_MODELS.items()
}
TABLE = Path(__file__).with_name("guard.json")
SEEDED = RESULTS / "decisions.json"  # the figures of more seeds
LOADS = (0.8, 1.0, 1.5, 2.0)  # times capacity
ENGINES = (2, 4, 8, 16)
SEEDS = 3
QUICK = 400  # requests of a short cell
CHUNK = 2_048  # --long-prefill-token-threshold
CASED = ("b2b-saas", "code-gen", "mix-b", "rag-8k")
CASE_LOADS = (0.95, 1.5)
CHAT_MOST = 5_000  # prompt tokens of a chat
TARGET_S = (2.0, 15.0)  # TTFT of chats and of documents: `simulate`'s defaults
TOKEN_S = 0.1  # of the whole answer's target, for each token


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the table: a workload, its load as a share of capacity, and the engines."""

    kind: str
    load: float
    engines: int = 2
    chunk: int = 0
    seeds: int = SEEDS
    requests: int = 0  # only so many of the first ones; 0: all
    is_case: bool = False

    @property
    def name(self) -> str:
        flag, quick = " flag" * bool(self.chunk), "quick " * bool(self.requests)
        case = "case " * self.is_case
        return f"{case}{quick}{self.kind} {self.load:g}x on {self.engines}{flag}"


def all_cells() -> Iterator[Cell]:
    """Yield the cells of the guard: some of the page's, so that it ends in minutes."""
    for name, kind in KINDS.items():
        yield Cell(name, 1.5, seeds=1, requests=QUICK)
        for cell in long_cells(name):
            wide = kind.wide or cell.engines <= 4
            listed = cell.engines in (2, 8) or cell.load in (LOADS[0], LOADS[-1])
            if wide and listed:
                yield replace(cell, seeds=SEEDS if cell.engines == 2 else 1)
    for name in CASED:
        for load in CASE_LOADS:
            yield Cell(name, load, CASES[name].engines, seeds=1, is_case=True)


def long_cells(kind: str) -> Iterator[Cell]:
    """Yield all cells of a kind of traffic on the page."""
    for engines in ENGINES:
        for chunk in (0, CHUNK) if KINDS[kind].flag else (0,):
            for load in LOADS:
                yield Cell(kind, load, engines, chunk)


def play(cell: Cell, policy: str) -> Figures:
    outcomes: list[SimOutcome] = []
    span_s = 0.0
    engine = replace(ENGINE, long_prefill_token_threshold=cell.chunk)
    case = CASES[cell.kind] if cell.is_case else None
    for seed in range(cell.seeds):
        if case is not None:
            engine = case.engine()
            rows = case.make([(case.seconds, cell.load * case.capacity)], seed)
        else:
            rows = rows_at_capacity(cell.kind, cell.engines, seed)[: cell.requests or None]
            rows = [replace(row, arrival_s=row.arrival_s / cell.load) for row in rows]
        span_s += rows[-1].arrival_s
        outcomes += play_rows(rows, policy, engine, cell.engines)
    return figures(outcomes, span_s)


def play_rows(rows: Rows, policy: str, engine: EngineConfig, engines: int) -> Sequence[SimOutcome]:
    """Play the requests through a policy and equal engines."""
    scenario = Scenario(engine=engine, gpus=engines)
    chosen = scenario if policy == FOREBAY else replace(scenario, policy=policy)
    fleet = {f"gpu{number}": served_engine(engine) for number in range(engines)}
    return Fleet(chosen.new_policy(list(fleet)), fleet).run(rows)


def quantile(values: NDArray[np.float64], share: float) -> float:
    """Return the quantile by nearest rank, or NaN without requests."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else math.nan


def figures(outcomes: Sequence[SimOutcome], span_s: float) -> Figures:
    """Return the values of FIGURES, with None where there is no such request."""
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
        int(good.sum()) / span_s,
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


def entry_of(cell: Cell, models: Collection[str]) -> Entry:
    entry: Entry = {"now": play(cell, FOREBAY)}
    if models:
        entry["models"], entry["by"] = best_model({name: play(cell, name) for name in models})
    return entry


def play_seeds(cells: Sequence[Cell], jobs: int, with_models: bool) -> None:
    """Play Forebay and, where they are missing, the best models, and keep each result at once."""
    known, table = read(TABLE), read(SEEDED)
    models = [
        sorted(set(known[cell.name]["by"]) if cell.name in known else MODELS)
        if with_models or table.get(cell.name, {}).get("seeds") != cell.seeds
        else []
        for cell in cells
    ]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for cell, entry in zip(cells, pool.map(entry_of, cells, models), strict=True):
            table[cell.name] = {**table.get(cell.name, {}), "seeds": cell.seeds, **entry}
            print(shown(cell.name, table[cell.name]), flush=True)
            write(SEEDED, table, [cell.name for kind in KINDS for cell in long_cells(kind)])


def counted(options: argparse.Namespace) -> Table:
    """Return the instruction counts, where they are asked for and can be had."""
    if options.only:
        return {}
    if options.quick or not available():
        print(f"instructions are not counted{'' if options.quick else ': there is no valgrind'}")
        return {}
    return {f"{COUNTED}, {INTERPRETER}": {"now": [None, None, *counts()]}}


def sums(cells: Sequence[Cell], played: Table) -> Table:
    """Return the means over the cells of the twelve kinds."""
    found: Table = {}
    for name, short in ((MEAN, False), (f"quick {MEAN}", True)):
        listed = [
            played[cell.name]["now"]
            for cell in cells
            if bool(cell.requests) == short and not cell.is_case
        ]
        if listed:
            found[name] = {"now": mean(listed)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="cells with this in their name")
    parser.add_argument("--quick", action="store_true", help="only short cells")
    parser.add_argument("--write", action="store_true", help="keep the figures of today")
    parser.add_argument("--models", action="store_true", help="play the router models, too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seeds", type=int, metavar="N", help="play N seeds of each long cell")
    options = parser.parse_args()
    page = [cell for kind in KINDS for cell in long_cells(kind)]
    cells = [
        cell
        for cell in (page if options.seeds else all_cells())
        if options.only in cell.name and (cell.requests or not options.quick)
    ]
    if not cells:
        parser.error(f"--only {options.only}: no cell has that in its name")
    if options.seeds:
        long = [replace(cell, seeds=options.seeds) for cell in cells]
        play_seeds(long, options.jobs, options.models)
        return
    table = read(TABLE)
    instructions = counted(options)  # first: if they cannot be counted, no minutes are lost
    models = [list(MODELS) * (options.models or cell.name not in table) for cell in cells]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        entries = pool.map(entry_of, cells, models, chunksize=4)
        played = {cell.name: entry for cell, entry in zip(cells, entries, strict=True)}
    if not options.only:
        played |= sums(cells, played)
    played |= instructions
    new = updated(table, played)
    print("\n".join(shown(name, new[name]) for name in played))
    lost = list(losses(table, played))
    print("\n".join(loss.text for loss in lost) or "no figure lost more than 2 %")
    if options.write or options.models:
        write(TABLE, new, [cell.name for cell in all_cells()])
    sys.exit(any(loss.matters for loss in lost) and not options.write)


if __name__ == "__main__":
    main()
