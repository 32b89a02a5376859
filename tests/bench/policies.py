"""Compare Forebay's policy with models of other routers (python tests/bench/policies.py).

Virtual time: two simulated engines (Llama-3-8B, H200) or those that the workload names, the same
requests for everybody. The models
(`replay/sim/routers/models.py`) choose as the named routers do by their documentation and source;
they are not these routers. Nobody but Forebay and the model with a queue refuses anything, so a
refused request counts as an infinite TTFT and as a missed target.

    python tests/bench/policies.py                          # all workloads and policies, 5 seeds
    python tests/bench/policies.py "chat beside" --seeds 2  # those whose name has this in it
    python tests/bench/policies.py --highest-load [--chunk 2048]  # and --write-docs afterwards
    python tests/bench/policies.py --ablation --slo --interval 2  # vLLM's order, cadence

What was played is kept in --out by the source that played it; a second run plays only what is
missing. Workloads of public traces need --data (see CONTRIBUTING.md).
"""

import argparse
import ast
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from arena_ablations import WITHOUT, show, slo_order
from arena_floor import floor_s, prefill_on
from arena_highest import (
    HIGHEST_LOADS,
    PLAYED_POLICIES,
    Search,
    add_records,
    read_records,
    search_all,
)
from arena_highest_page import shown_load, write_docs
from arena_policies import FLOOR, FOREBAY, MODELS, POSSIBLE, STANDARD, new_policy, possible_of
from arena_score import (
    SLO_S,
    Played,
    Ratio,
    goodput_ratio,
    joined,
    of_floor,
    of_outcomes,
    quantile,
    ttft_ratio,
)
from arena_workloads import LOADS, Load, rows_of
from paths import BENCHMARKS, RESULTS, ROOT, SHARED

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet
from forebay.replay.sim.scenario import ALL_KNOWING, POLICIES

SMG = ("smg_cache_aware", "smg_prefix_hash")
# Whose source decides what a policy does, besides the engines'.
SIMULATOR = (
    "replay/sim",
    "replay/engine",
    "traces",
    "tests/support/overload.py",
    "tests/bench/arena_workloads.py",
)
CORE = ("proxy/core", "proxy/config/schema.py")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of all engines: `chunk` is --long-prefill-token-threshold, 0: off.

    Attributes:
        interval: --prefill-schedule-interval.
        slo: they order their waiting requests by SloQueue.
    """

    chunk: int = 0
    interval: int = 1
    slo: bool = False

    @property
    def name(self) -> str:
        name = f"-{self.chunk}" if self.chunk else ""
        return name + f"-interval{self.interval}" * (self.interval > 1) + "-slo" * self.slo

    def of(self, engine: EngineConfig) -> EngineConfig:
        return replace(
            engine,
            long_prefill_token_threshold=self.chunk,
            prefill_schedule_interval=self.interval,
        )


@dataclass(frozen=True, slots=True)
class Cell:
    load: str
    policy: str
    seed: int
    engine: Options
    data: Path
    file: Path


def play(cells: Sequence[Cell]) -> None:
    """One workload of one seed under each of several policies."""
    load = next(one for one in LOADS if one.name == cells[0].load)
    rows = rows_of(load, cells[0].seed, cells[0].data)
    for cell in cells:
        listed = [cell.engine.of(e) for e in load.engines]
        engine = listed[0]  # of a mixed fleet, the fastest
        if cell.policy == FLOOR:
            part = of_floor(floor_s(rows, prefill_on(engine)), rows, cell.seed)
        elif cell.policy == POSSIBLE:
            part = possible_of(rows, cell.seed)
        else:
            names = [f"gpu{number}" for number in range(len(listed))]
            order = cell.engine.slo
            with slo_order(order), new_policy(cell.policy, load, engine, names) as policy:
                new = [served_engine(e, exact=order) for e in listed]
                fleet = Fleet(policy, dict(zip(names, new, strict=True)))
                part = of_outcomes(fleet.run(rows), cell.seed)
        unfinished = cell.file.with_suffix(f".{os.getpid()}.npz")
        np.savez(unfinished, **{name: getattr(part, name) for name in Played.__slots__})
        unfinished.rename(cell.file)


def source_hash(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        path = ROOT / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(ast.dump(ast.parse(file.read_text())).encode())  # not its layout
    return digest.hexdigest()[:12]


def cells(
    loads: Sequence[Load],
    policies: Sequence[str],
    seeds: int,
    engine: Options,
    data: Path,
    out: Path,
) -> dict[tuple[str, str], list[Cell]]:
    simulator, core = source_hash(SIMULATOR), source_hash((*SIMULATOR, *CORE))
    made_by = dict.fromkeys((*MODELS, ALL_KNOWING, POSSIBLE), simulator)
    made_by[FLOOR] = source_hash(
        (*SIMULATOR, "analysis/sizing/floor.py", "tests/bench/arena_floor.py")
    )
    found = {}
    for load in loads:
        for policy in policies:
            by = made_by.get(policy, core)
            name = re.sub(r"[^a-z0-9.]+", "_", f"{load.name}-{policy}".lower())
            name += engine.name
            found[load.name, policy] = [
                Cell(load.name, policy, seed, engine, data, out / f"{name}-{seed}-{by}.npz")
                for seed in range(seeds)
            ]
    return found


def read(listed: Sequence[Cell]) -> Played:
    parts = []
    for cell in listed:
        with np.load(cell.file) as kept:
            parts.append(Played(*(kept[name] for name in Played.__slots__)))
    return joined(parts)


# What is shown.


def ms(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    if math.isinf(seconds):
        return "refused"
    return f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def table(load: Load, played: dict[str, Played]) -> Iterator[str]:
    one = next(iter(played.values()))
    floor, possible = played.get(FLOOR), played.get(POSSIBLE)
    yield ""
    yield (
        f"## {load.name}: load {load.share:g}, {int(one.chat.sum())} chats, "
        f"{int((~one.chat).sum())} documents"
    )
    yield ""
    yield (
        "| policy | chat TTFT p50 / p99 s | document p50 / p99 s | worst stall s | in time % "
        "(chat / document) | of possible % | hit ratio | of all-knowing | imbalance | refused % |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    known = played[ALL_KNOWING].hit_ratio() if ALL_KNOWING in played else 0.0
    for name, p in played.items():
        if p is floor or p is possible:
            continue
        chat, document = p.ttft_s[p.chat], p.ttft_s[~p.chat]
        good = p.good

        def share(of: np.ndarray, good: np.ndarray = good) -> str:
            return f"{100 * good[of].mean():.1f}" if of.any() else "-"

        hits = p.hit_ratio()
        spread = "-" if load.kind == "mixed" else f"{p.imbalance(len(load.engines)):.2f}"
        yield (
            f"| {name} | {ms(quantile(chat, 0.5))} / {ms(quantile(chat, 0.99))} "
            f"| {ms(quantile(document, 0.5))} / {ms(quantile(document, 0.99))} "
            f"| {p.stall_s.max():.2f} "
            f"| {100 * good.mean():.1f} ({share(p.chat)} / {share(~p.chat)}) "
            f"| {f'{100 * good.sum() / possible.good.sum():.1f}' if possible else '-'} "
            f"| {hits:.3f} | {f'{hits / known:.0%}' if known else '-'} "
            f"| {spread} | {100 * p.refused.mean():.1f} |"
        )
    if floor is not None:
        least = ", ".join(
            f"{name} {ms(quantile(floor.ttft_s[floor.chat == chat], 0.99))} s"
            for chat, name in ((True, "chat"), (False, "document"))
            if (floor.chat == chat).any()
        )
        yield ""
        yield f"No router can have less (p99 with {FLOOR}): {least}"


class Verdicts:
    """Must show 2, line by line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.missed = 0
        self.beyond = 0  # of those missed, what no router can meet

    def line(self, what: str, wanted: str, got: str, met: bool) -> None:
        self.missed += not met
        self._say(f"{'met ' if met else 'MISS'}  {what:<62} {wanted:<12} {got}")

    def judge(self, load: Load, played: dict[str, Played]) -> None:
        ours = played[FOREBAY]
        peers = {name: p for name, p in played.items() if name in MODELS}
        beaten = load.kind != "overload"
        for chat, name in ((True, "chat"), (False, "document")):
            if not (ours.chat == chat).any() or not beaten:
                continue
            ratios = {n: ttft_ratio(p, ours, chat, 0.99) for n, p in peers.items()}
            best, ratio = _worst(ratios)
            wanted = 3.0 if chat and load.kind == "chat" else 1 / 1.05
            if not chat and load.kind == "shared":
                wanted = 1.5
            got, met = str(ratio), ratio.value >= wanted
            if not met and FLOOR in played:
                most = ttft_ratio(peers[best], played[FLOOR], chat, 0.99).value
                got += f"; no router has more than {most:.2f}"
                self.beyond += most < wanted
            self.line(
                f"{load.name}: {name} p99 TTFT, best peer's ({best}) of ours",
                f">= {wanted:.2f}", got, met,
            )  # fmt: skip
        if load.kind == "mixed" and (smg := {n: peers[n] for n in SMG if n in peers}):
            ratios = {n: ttft_ratio(p, ours, None, 0.99) for n, p in smg.items()}
            best, ratio = _worst(ratios)
            self.line(
                f"{load.name}: p99 TTFT of all, SMG's ({best}) of ours",
                ">= 3.00", str(ratio), ratio.value >= 3.0,
            )  # fmt: skip
        goods = {n: goodput_ratio(ours, p) for n, p in peers.items()}
        best, ratio = _worst(goods)
        wanted = 2.0 if load.kind == "overload" and load.share >= 1.5 else 1 / 1.05
        self.line(
            f"{load.name}: goodput, ours of the best peer's ({best})",
            f">= {wanted:.2f}", str(ratio), ratio.value >= wanted,
        )  # fmt: skip
        if ALL_KNOWING in played and (known := played[ALL_KNOWING].hit_ratio()) > 0.02:
            share = ours.hit_ratio() / known
            self.line(
                f"{load.name}: hit ratio, of the all-knowing router's", ">= 0.95",
                f"{share:.2f}", share >= 0.95,
            )  # fmt: skip
        if load.kind == "mixed":
            return  # engines of different speed should not get the same
        imbalance = ours.imbalance(len(load.engines))
        self.line(f"{load.name}: imbalance", "< 1.30", f"{imbalance:.2f}", imbalance < 1.3)


def _worst(ratios: dict[str, Ratio]) -> tuple[str, Ratio]:
    name = min(ratios, key=lambda n: ratios[n].value)
    return name, ratios[name]


def find_highest_loads(options: argparse.Namespace) -> None:
    loads = [x.name for x in HIGHEST_LOADS if not x.data or (options.data / "traces").is_dir()]
    wanted = options.loads or [""]
    searches = [
        Search(load, policy, options.chunk, options.seeds, options.data)
        for load in loads
        if any(part in load for part in wanted)
        for policy in options.policy or PLAYED_POLICIES
    ]
    for record in search_all(searches, options.jobs):
        add_records(options.results, [record])
        print(f"{record['workload']}, {record['policy']}: {shown_load(record)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loads", nargs="*", help="workloads whose name has this in it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policy", action="append", help="only these [default: all]")
    parser.add_argument("--chunk", type=int, default=0, metavar="TOKENS",
        help="of the engines: --long-prefill-token-threshold [default: 0, off]")  # fmt: skip
    parser.add_argument("--interval", type=int, default=1, metavar="N",
        help="of the engines: --prefill-schedule-interval [default: 1, off]")  # fmt: skip
    parser.add_argument("--slo", action="store_true",
        help="the engines order waiting requests by their targets, as vllm#53571")  # fmt: skip
    parser.add_argument("--ablation", action="store_true", help="Forebay without one part each")
    parser.add_argument("--highest-load", action="store_true",
        help="the highest load with 99 %% in time, of each policy; into --results")  # fmt: skip
    parser.add_argument("--write-docs", action="store_true",
        help="only write the tables of --results into bench-policies.md")  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS / "bench-policies.jsonl.gz")
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "policies")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.write_docs:
        write_docs(BENCHMARKS / "bench-policies.md", read_records(options.results))
        return
    if options.highest_load:
        find_highest_loads(options)
        return
    started = time.monotonic()
    chosen = [x for x in LOADS if not options.loads or any(o in x.name for o in options.loads)]
    if not chosen:
        parser.error(f"no workload has that in its name; {', '.join(x.name for x in LOADS)}")
    known = (FOREBAY, FLOOR, POSSIBLE, *POLICIES)
    if unknown := set(options.policy or ()) - {*known, *WITHOUT}:
        parser.error(f"--policy {min(unknown)}: none of {', '.join(known)}")
    missing = [x.name for x in chosen if x.data and not (options.data / "traces").is_dir()]
    loads = [x for x in chosen if x.name not in missing]
    policies = options.policy or list(STANDARD)
    if options.ablation:
        policies = [FOREBAY, *(options.policy or WITHOUT)]
        loads = [x for x in loads if x.kind != "sessions"]  # they need another configuration
    options.out.mkdir(parents=True, exist_ok=True)
    engine = Options(options.chunk, options.interval, options.slo)
    played = cells(loads, policies, options.seeds, engine, options.data, options.out)
    todo = [cell for listed in played.values() for cell in listed if not cell.file.exists()]
    together: dict[tuple[str, int], list[Cell]] = {}
    for cell in todo:
        together.setdefault((cell.load, cell.seed), []).append(cell)
    if options.jobs > 1 and len(together) > 1:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            list(pool.map(play, together.values()))
    else:
        for group in together.values():
            play(group)
    count = sum(map(len, played.values()))
    print(
        f"{len(loads)} workloads, {len(policies)} policies, seeds 0 to {options.seeds - 1}; in "
        f"time: TTFT at most {SLO_S[0]:g} s (chat, up to 5,000 tokens) or {SLO_S[1]:g} s beyond "
        "that on an idle engine with an empty cache"
    )
    if missing:
        print(f"left out, there is no {options.data}: {', '.join(missing)}")
    results = {x: {name: read(played[x.name, name]) for name in policies} for x in loads}
    if options.ablation:
        print("\n".join(show({x.name: results[x] for x in loads}, FOREBAY, policies[1:])))
    else:
        for load, by_policy in results.items():
            print("\n".join(table(load, by_policy)))
        print()
        if FOREBAY in policies and any(name in MODELS for name in policies):
            verdicts = Verdicts(print)
            for load, by_policy in results.items():
                verdicts.judge(load, by_policy)
            print(f"{verdicts.missed} missed, {verdicts.beyond} of them out of any router's reach")
    print(
        f"{count} runs, {len(todo)} of them played now, {time.monotonic() - started:.0f} s; "
        "valid: virtual time, exact for a seed whatever the machine"
    )


if __name__ == "__main__":
    main()
