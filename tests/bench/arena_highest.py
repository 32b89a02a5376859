"""Find the highest load that a policy serves to 99 % in time, and its goodput at 2x capacity.

A load is a share of capacity (arena_workloads.py). The requests are the same at each load, only
their arrivals are closer together. Attainment counts the requests of all seeds. It is taken to fall
with load, so a bisection finds where it crosses 99 %, on a grid of loads that are 2 % apart.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import orjson
from arena_policies import FOREBAY, MODELS, POSSIBLE, new_policy, possible_of
from arena_score import Played, joined, of_outcomes
from arena_workloads import ENGINE, ENGINES, LOADS, Load, Rows, at_load
from overload import capacity, mix, poisson
from result_lines import read_lines, write_lines

from forebay.analysis.search.bracket import bracket
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet

WANTED = 0.99
STEP = 1.02  # between two loads of the grid
LOWEST, MOST = 0.05, 10.0  # loads; at 10x nearly all of a trace comes at once
INDEX_MOST = math.floor(math.log(MOST / LOWEST, STEP))
PLAYED_POLICIES = (FOREBAY, *MODELS, POSSIBLE)
Record = dict[str, Any]


def _five_minutes(seed: int, data: Path) -> Rows:
    return poisson(mix, [(300.0, capacity(mix))], seed)


HIGHEST_LOADS = (
    *(
        load
        for load in LOADS
        if load.kind not in ("mixed", "sessions") and not load.name.startswith("overload")
    ),
    Load("chats and documents", _five_minutes, 1.0, "overload"),
)


@dataclass(frozen=True, slots=True)
class Search:
    """One question: how high a load does this policy take?"""

    load: str
    policy: str
    chunk: int
    seeds: int
    data: Path

    def record(self, guess: int) -> tuple[Record, int]:
        """Answer it, beginning the search at a place in the grid; also returns the place found."""
        tried: dict[int, float] = {}

        def passes(index: int) -> bool:
            tried[index] = self._attainment(load_at(index))
            return tried[index] >= WANTED

        found = bracket(passes, guess, 0, INDEX_MOST).low
        twice = joined([self._play(seed, 2.0) for seed in range(self.seeds)])
        chat, good, refused = twice.chat, twice.good, twice.refused
        record = {
            "workload": self.load,
            "policy": self.policy,
            "chunk": self.chunk,
            "seeds": self.seeds,
            "highest_load": load_at(found) if found >= 0 else None,
            "capped": found == INDEX_MOST,
            "attainment": tried.get(found),
            "attainment_beyond": tried.get(found + 1),
            "at_2x": {
                name: {
                    "requests": int(kind.sum()),
                    "in_time": int((kind & good).sum()),
                    "refused": int((kind & refused).sum()),
                }
                for name, kind in (("chat", chat), ("document", ~chat))
            },
        }
        return record, found

    def _attainment(self, load: float) -> float:
        """Share of the requests of all seeds in time; the rest is not played once too many miss."""
        counts = [len(_rows(self.load, seed, self.data)) for seed in range(self.seeds)]
        missed = 0
        for seed in range(self.seeds):
            missed += int((~self._play(seed, load).good).sum())
            if missed > (1 - WANTED) * sum(counts) + 1e-9:
                break
        return 1 - missed / sum(counts)

    def _play(self, seed: int, load: float) -> Played:
        rows = [
            replace(row, arrival_s=row.arrival_s / load)
            for row in _rows(self.load, seed, self.data)
        ]
        if self.policy == POSSIBLE:
            return possible_of(rows, seed)
        engine = replace(ENGINE, long_prefill_token_threshold=self.chunk)
        names = [f"gpu{number}" for number in range(ENGINES)]
        with new_policy(self.policy, _load(self.load), engine, names) as policy:
            fleet = Fleet(policy, {name: served_engine(engine) for name in names})
            return of_outcomes(fleet.run(rows), seed)


@lru_cache(16)
def _rows(name: str, seed: int, data: Path) -> Rows:
    return at_load(_load(name).make(seed, data), 1.0)


def _load(name: str) -> Load:
    return next(one for one in HIGHEST_LOADS if one.name == name)


def load_at(index: int) -> float:
    return LOWEST * STEP**index


def search_all(searches: Sequence[Search], jobs: int) -> Iterator[Record]:
    """Answer all; a search begins where the one before it on the same workload ended."""
    groups: dict[str, list[Search]] = {}
    for search in searches:
        groups.setdefault(search.load, []).append(search)
    if jobs <= 1:
        for group in groups.values():
            yield from _searched(group)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for records in pool.map(_listed, groups.values()):
            yield from records


def _searched(group: Sequence[Search]) -> Iterator[Record]:
    guess = round(math.log(1.0 / LOWEST, STEP))
    for search in group:
        record, guess = search.record(guess)
        yield record


def _listed(group: Sequence[Search]) -> list[Record]:
    return list(_searched(group))


def add_records(path: Path, records: Sequence[Record]) -> list[Record]:
    """Replace what `path` has of the same workload, policy and chunk; returns all, in order."""
    kept = {_key(record): record for record in (*read_records(path), *records)}
    ordered = sorted(kept.values(), key=_key)
    write_lines(path, map(orjson.dumps, ordered))
    return ordered


def read_records(path: Path) -> list[Record]:
    return [orjson.loads(line) for line in read_lines(path)]


def _key(record: Record) -> tuple[int, int, int]:
    """Order of the workloads and policies as they are listed; what is listed no more goes last."""
    loads = [load.name for load in HIGHEST_LOADS]
    return (
        record["chunk"],
        _place(record["workload"], loads),
        _place(record["policy"], PLAYED_POLICIES),
    )


def _place(name: str, listed: Sequence[str]) -> int:
    return listed.index(name) if name in listed else len(listed)
