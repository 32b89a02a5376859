"""The figures of README.md: python tests/bench/headline.py (virtual time, make headline).

Two kinds of traffic on simulated H200 GPUs, with vLLM's default flags, with
--long-prefill-token-threshold, and with Forebay's scheduler class inside vLLM. Forebay, models of
other routers and a fleet that is split by hand get the same requests.

A router sustains a load if 95 % of the chats and 95 % of the documents have their first token in
time. Its highest load is found in steps of 5 %, for all seeds together and for each seed. All are
then played at 50 % and 80 % of the highest load of the best other router. Shared documents are also
played at 1.5 times what the best of all sustains, and chats beside documents with the flag at the
load without it.

results/headline.json keeps each result at once, with the commit that played it. Models of routers
do not depend on Forebay's policy, so what is there of them stays. Forebay is played again when a
commit has changed the policy since. --again plays all that is chosen.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().with_name("cases")))

from cases import POLICY_FILES, commit
from guard import CHAT_MOST, CHUNK, FOREBAY, MODELS, TARGET_S, play_rows
from guard_workloads import ENGINE, Rows
from paths import RESULTS

from forebay.analysis.statistics.quantiles import percentile_table
from forebay.replay.sim.fleet import SimOutcome
from forebay.replay.sim.scenario import DIRECT
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import Workload, workload
from forebay.traces.synth.lengths import Lognormal

TABLE = RESULTS / "headline.json"
SEEDS = 5
SECONDS = {"beside": 3_600.0, "shared": 600.0}  # of arrivals, for each seed
FIRST_STEP = {"beside": 4, "shared": 26}  # of the search: most routers sustain about this
SUSTAINED = 0.95  # of the chats, and of the documents
STEP = 1.05  # between two loads of the search
SHARES = {"50%": 0.5, "80%": 0.8}  # of what the best other router sustains
OVERLOAD = 1.5  # times what the best of all sustains
SPLIT = "split"  # half of the GPUs for chats, half for documents; least connections in each
ROUTERS = (FOREBAY, *MODELS, SPLIT)
ALONE = (FOREBAY, DIRECT)
ENGINES = {
    "default": ENGINE,
    "flag": replace(ENGINE, long_prefill_token_threshold=CHUNK),
    "class": replace(ENGINE, scheduler_cls="forebay"),
}


def beside(rate_per_s: float, seed: int) -> Rows:
    """Twenty chats to each question about a document of 120,000 tokens, five questions each."""
    spec = ChatBesideDocuments(
        chat_rate_per_s=rate_per_s * 20 / 21, document_rate_per_s=rate_per_s / 21,
        duration_s=SECONDS["beside"], seed=seed,
    )  # fmt: skip
    return list(chat_beside_documents(spec))


def shared(rate_per_s: float, seed: int) -> Rows:
    """Two chats to three questions about 100 documents, more than the GPUs' caches hold."""
    spec = Workload(
        documents=100, zipf_s=1.0, document_tokens=Lognormal(30_000, 0.6, 10_000, 100_000),
        chat_share=0.4, instruction_tokens=1_024, rate_per_s=rate_per_s,
        duration_s=SECONDS["shared"], seed=seed,
    )  # fmt: skip
    return list(workload(spec))


TRAFFIC: dict[str, Callable[[float, int], Rows]] = {"beside": beside, "shared": shared}


@dataclass(frozen=True, slots=True)
class Cell:
    traffic: str
    flags: str
    gpus: int = 2

    @property
    def name(self) -> str:
        return f"{self.traffic}, {self.flags}, {self.gpus}"

    @property
    def measure(self) -> "Cell":
        """The cell whose best other router names the loads, for each GPU."""
        return replace(self, flags="flag" if self.flags == "class" else self.flags, gpus=2)

    @property
    def routers(self) -> Sequence[str]:
        return ROUTERS if self == self.measure else ALONE


CELLS = (
    *(Cell(traffic, flags) for traffic in TRAFFIC for flags in ("flag", "default")),
    Cell("beside", "class"),
    *(Cell("beside", flags, gpus) for flags in ENGINES for gpus in (1, 4)),
)
FLAGGED = Cell("beside", "flag")
SAME = "as without the flag"  # this load, with the flag


@lru_cache(2)
def rows_of(traffic: str, rate_per_s: float, seed: int) -> Rows:
    return TRAFFIC[traffic](rate_per_s, seed)


def is_chat(row: SimOutcome) -> bool:
    return row.request.input_tokens <= CHAT_MOST


def play(cell: Cell, router: str, rate_per_s: float, seed: int) -> list[SimOutcome]:
    rows, engine = rows_of(cell.traffic, rate_per_s, seed), ENGINES[cell.flags]
    if router != SPLIT:
        return list(play_rows(rows, router, engine, cell.gpus))
    parts = [[row for row in rows if (row.input_tokens <= CHAT_MOST) == short] for short in (0, 1)]
    played = (play_rows(part, "least_connections", engine, cell.gpus // 2) for part in parts)
    return [outcome for part in played for outcome in part]


def in_time(outcomes: Sequence[SimOutcome]) -> list[float]:
    """Return the shares of the chats, of the documents and of all that are in time."""
    chat = np.array([is_chat(outcome) for outcome in outcomes])
    ttft_s = np.array([np.nan if o.ttft_s is None else o.ttft_s for o in outcomes])
    met = ttft_s <= np.where(chat, *TARGET_S)  # False for nan
    return [float(part.mean()) for part in (met[chat], met[~chat], met)]


def highest(cell: Cell, router: str) -> list[float]:
    """Return the highest load of all seeds together, and the least and the most of one seed."""

    def rate(step: int) -> float:
        return round(STEP**step, 4)

    def sustained(step: int, seeds: Sequence[int]) -> bool:
        outcomes = [o for seed in seeds for o in play(cell, router, rate(step), seed)]
        return min(in_time(outcomes)[:2]) >= SUSTAINED

    middle = highest_step(lambda step: sustained(step, range(SEEDS)), FIRST_STEP[cell.traffic], 4)
    alone = [highest_step(partial(sustained, seeds=[seed]), middle, 2) for seed in range(SEEDS)]
    return [rate(step) for step in (middle, min(alone), max(alone))]


def highest_step(met: Callable[[int], bool], start: int, stride: int) -> int:
    """Return a step that is met before one that is not, near `start`."""
    met, low = lru_cache(None)(met), start
    while not met(low):
        low -= stride
    high = low + stride
    while met(high):
        low, high = high, high + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return low


def figures(cell: Cell, router: str, rate_per_s: float) -> dict[str, Any]:
    """Return times in seconds and shares of all seeds' requests, and their ranges over seeds."""
    seeds = [play(cell, router, rate_per_s, seed) for seed in range(SEEDS)]
    outcomes = [outcome for played in seeds for outcome in played]
    kept: dict[str, Any] = {"per_s": rate_per_s}
    for number, (name, short) in enumerate((("chats", True), ("documents", False))):
        ttfts_s = [
            [o.ttft_s for o in played if is_chat(o) == short and o.ttft_s is not None]
            for played in seeds
        ]
        whole = percentile_table([ttft_s for part in ttfts_s for ttft_s in part])
        parts = [percentile_table(part).values for part in ttfts_s]
        kept[name] = {
            "requests": sum(is_chat(outcome) == short for outcome in outcomes),
            "answered": whole.count,
            **{
                share: _over([whole.values[share], *(part[share] for part in parts)])
                for share in ("p50", "p90", "p99")
            },
            "max": whole.max,
            "in_time": _over([in_time(played)[number] for played in (outcomes, *seeds)]),
        }
    served = [outcome for outcome in outcomes if outcome.served is not None]
    tokens = sum(outcome.request.input_tokens for outcome in served)
    kept |= {
        "in_time": _over([in_time(played)[2] for played in (outcomes, *seeds)]),
        "pause_p99": _over([_pause_p99(played) for played in (outcomes, *seeds)]),
        "rejected": 1 - sum(outcome.ttft_s is not None for outcome in outcomes) / len(outcomes),
        "good_per_s": in_time(outcomes)[2] * len(outcomes) / SEEDS / SECONDS[cell.traffic],
        "hits": sum(outcome.cached_tokens for outcome in served) / tokens,
    }
    return {name: _rounded(of) for name, of in kept.items()}


def _over(values: Sequence[float | None]) -> list[float] | None:
    """Return the first, and the least and the most of the others where all have enough requests."""
    first, *others = values
    if first is None:
        return None
    known = [value for value in others if value is not None]
    return [first, min(known), max(known)] if len(known) == len(others) else [first]


def _pause_p99(outcomes: Sequence[SimOutcome]) -> float | None:
    """Return the 99th percentile of the longest pauses in answers, seconds."""
    return percentile_table([o.served.stall_s for o in outcomes if o.served is not None]).values[
        "p99"
    ]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(of) for name, of in value.items()}
    if isinstance(value, list):
        return [_rounded(of) for of in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


Table = dict[str, dict[str, dict[str, Any]]]
"""By cell and router: the commit, the highest load of each seed, and figures at each load."""


def best_other(routers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the other router with the highest load."""
    others = (name for name in routers if name != FOREBAY)
    return max(others, key=lambda name: float(routers[name]["highest_per_s"][0]))


def loads(table: Table, cell: Cell) -> dict[str, float]:
    """Return requests a second by the name of the load."""
    routers = table[cell.measure.name]
    most = routers[best_other(routers)]["highest_per_s"][0] * cell.gpus / 2
    named = {name: share * most for name, share in SHARES.items()}
    if cell == FLAGGED:
        named[SAME] = loads(table, replace(cell, flags="default"))["80%"]
    if cell.traffic == "shared":
        named["overload"] = OVERLOAD * max(of["highest_per_s"][0] for of in routers.values())
    return {name: round(rate, 4) for name, rate in named.items()}


def read() -> Table:
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}


def keep(table: Table) -> None:
    new = TABLE.with_suffix(".new")
    cells = (
        f"{json.dumps(cell)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in routers.items())
        + "\n}"
        for cell, routers in table.items()
    )
    new.write_text("{\n" + ",\n".join(cells) + "\n}\n", encoding="utf-8")
    new.rename(TABLE)


def chosen(cells: str, routers: str) -> Iterator[tuple[Cell, str]]:
    for cell in CELLS:
        for router in cell.routers:
            if cells in cell.name and router.startswith(routers):
                yield cell, router


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", metavar="NAME", help="cells with this in their name")
    parser.add_argument("--only", default="", metavar="NAME", help="routers that begin with this")
    parser.add_argument("--again", action="store_true", help="play what is there, too")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    table, all_of, policy = read(), commit("proxy", "replay", "traces"), commit(*POLICY_FILES)

    def entry(cell: Cell, router: str) -> dict[str, Any]:
        """Return what is kept and not old."""
        kept = table.get(cell.name, {}).get(router, {})
        return {} if router == FOREBAY and kept.get("commit") != policy else kept

    def store(cell: Cell, router: str, new: dict[str, Any]) -> None:
        by = policy if router == FOREBAY else all_of
        kept = entry(cell, router)
        table.setdefault(cell.name, {})[router] = {**kept, "commit": by} | new
        print(cell.name, router, json.dumps(new), flush=True)
        keep(table)

    wanted = list(chosen(options.cells, options.only))
    for cell, router in wanted if options.again else ():
        table.get(cell.name, {}).pop(router, None)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [
            job for job in wanted if job[0] == job[0].measure and "highest_per_s" not in entry(*job)
        ]
        for job, found in zip(jobs, pool.map(highest, *columns(jobs, 2)), strict=True):
            store(*job, {"highest_per_s": found})
        played = [
            (*job, name, rate_per_s)
            for job in wanted
            for name, rate_per_s in loads(table, job[0]).items()
            if entry(*job).get(name, {}).get("per_s") != _rounded(rate_per_s)
        ]
        cells, routers, names, rates = columns(played, 4)
        results = pool.map(figures, cells, routers, rates)
        for cell, router, name, result in zip(cells, routers, names, results, strict=True):
            store(cell, router, {name: result})


def columns(rows: Sequence[tuple[Any, ...]], count: int) -> list[list[Any]]:
    return [[row[number] for row in rows] for number in range(count)]


if __name__ == "__main__":
    main()
