"""Compare policies on mixed fleets and on long agent sessions (python tests/bench/fleets.py).

Virtual time. `--write` writes docs/benchmarks/bench-fleets.md, which has no other source.
Workloads of public traces need --data (see CONTRIBUTING.md).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from arena_floor import floor_s, prefill_on
from arena_score import Played, joined, of_floor, of_outcomes, quantile
from arena_workloads import ENGINE, GPUS, LOADS, Load, Rows, long_sessions, rows_of
from paths import BENCHMARKS, SHARED

from forebay.analysis.sizing.floor import alone
from forebay.proxy.core.learn.prefix_index import PrefixIndex
from forebay.proxy.core.model import Action, Request, Send
from forebay.proxy.core.policy.routing import ROUTES, Affinity, Option, warm_or_least_work
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.engine.served import served_engine
from forebay.replay.sim.fleet import Fleet, Policy
from forebay.replay.sim.routers.models import ROUTER_MODELS
from forebay.replay.sim.scenario import Scenario
from forebay.traces.edit.sharing import IdealCache
from forebay.traces.schema import TraceRequest

FOREBAY = "forebay"
SMG = ("smg_cache_aware", "smg_prefix_hash")
OTHERS = (*SMG, "lmetric", "dynamo", "least_connections")  # Dynamo's queues do as Dynamo here
HOME = "pinned sessions"  # each stays on its engine
SIZES = (1_000, 10_000)  # prompt tokens of the learning curve
COUNTS = (0, 1, 5, 20, 100)  # prefills that an engine has computed
RATES = (0.005, 0.01, 0.0125)  # sessions a second


class PinnedSessions:
    """A route that keeps each session on its first engine. Sub-agents are sessions, too."""

    def __init__(self) -> None:
        self._home: dict[str, str] = {}

    def __call__(
        self, request: Request, options: Sequence[Option], affinity: Affinity, at: float
    ) -> Option:
        session = request.id.rpartition("-")[0]
        home = [option for option in options if option.backend == self._home.get(session)]
        chosen = home[0] if home else warm_or_least_work(request, options, affinity, at)
        self._home[session] = chosen.backend
        return chosen


class Learned:
    """What Forebay would predict for cold prompts, by the number of prefills an engine computed."""

    def __init__(self, engines: Sequence[EngineConfig]) -> None:
        self._engines = engines
        self._measured = {
            config: [alone(config, size).ttft_s for size in SIZES] for config in set(engines)
        }
        # By GPU, number of prefills and size: predicted over measured.
        self.ratios: dict[tuple[str, int, int], list[float]] = {}
        self._done: set[tuple[str, int]] = set()

    def watch(self, shaper: Shaper) -> "Learned":
        self._shaper = shaper
        self._done.clear()
        return self

    def __call__(self, now: float, action: Action) -> None:
        if not isinstance(action, Send):
            return
        cost = self._shaper.backends[action.backend].cost
        for count in COUNTS:  # several may have been computed since the last one was sent
            if cost.observations < count or (action.backend, count) in self._done:
                continue
            self._done.add((action.backend, count))
            config = self._engines[int(action.backend[3:])]
            for size, measured_s in zip(SIZES, self._measured[config], strict=True):
                found = self.ratios.setdefault((str(config.gpu), count, size), [])
                found.append(cost.predict_s(size, size) / measured_s)


def play(load: Load, rows: Rows, seed: int, policy: str, learned: Learned | None = None) -> Played:
    engines = {f"gpu{number}": served_engine(config) for number, config in enumerate(load.engines)}
    chosen: Policy
    if policy in ROUTER_MODELS:
        chosen, record = ROUTER_MODELS[policy][0](), None
    else:
        route = PinnedSessions() if policy == HOME else warm_or_least_work
        with patch.dict(ROUTES, {"warm_or_least_work": route}):
            chosen = Scenario(engine=load.engines[0], proxy=load.proxy).new_policy(list(engines))
        assert isinstance(chosen, Shaper)
        record = learned.watch(chosen) if learned else None
    return of_outcomes(Fleet(chosen, engines, record).run(rows), seed)


def shown(seconds: float) -> str:
    return "rejected" if seconds == float("inf") else f"{seconds:.2f}"


def mixed(seeds: int, data: Path) -> Iterator[str]:
    """The tables of mixed fleets."""
    learned: dict[tuple[str, int, int], list[float]] = {}
    yield "## Mixed fleets"
    yield ""
    yield (
        "One H200, one H100 and one L40S, or two of each, at 0.8 of their throughput; "
        f"{seeds} seeds. TTFT p50 and p99 over all requests of all seeds, in seconds. "
        "*Times*: p99 over Forebay's; *in time*: share of requests. "
        "A rejected request counts as infinite. The floor gives each request an H200 of its own, "
        "where all prefixes are kept."
    )
    columns = []
    for load in (load for load in LOADS if load.kind == "mixed"):
        if load.data and not (data / "traces").is_dir():
            continue
        watcher = Learned(load.engines)
        played: dict[str, list[Played]] = {name: [] for name in (FOREBAY, *OTHERS, "floor")}
        for seed in range(seeds):
            rows = rows_of(load, seed, data)
            for name in (FOREBAY, *OTHERS):
                played[name].append(play(load, rows, seed, name, watcher))
            played["floor"].append(of_floor(floor_s(rows, prefill_on(ENGINE)), rows, seed))
        for key, found in watcher.ratios.items():
            learned.setdefault(key, []).extend(found)
        by_policy = {name: joined(parts) for name, parts in played.items()}
        columns.append(dict(_mixed_cells(load, by_policy)))
    yield ""
    yield from _side_by_side(columns)
    yield from _curve(learned)


def _mixed_cells(load: Load, played: dict[str, Played]) -> Iterator[tuple[str, str]]:
    """Yield the labels and cells of a fleet's column, the head first."""
    yield "p50, p99, times; in time", load.name
    ours = quantile(played[FOREBAY].ttft_s, 0.99)
    for name, p in played.items():
        p50, p99 = (quantile(p.ttft_s, share) for share in (0.5, 0.99))
        good = f"; {100 * p.good.mean():.1f} %" if name != "floor" else ""
        yield name, f"{shown(p50)}, {shown(p99)}, {p99 / ours:.2f}{good}"
    for bucket in ("chats", "documents"):
        cells = []
        for name in (FOREBAY, *SMG[:1], "lmetric"):
            p = played[name]
            chosen = p.chat if bucket == "chats" else ~p.chat
            cells.append(shown(quantile(p.ttft_s[chosen], 0.99)))
        yield f"{bucket}' p99: forebay, {SMG[0]}, lmetric", ", ".join(cells)


def _side_by_side(columns: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield a table of columns with the same labels, the head first."""
    for number, label in enumerate(columns[0]):
        yield f"| {label} | {' | '.join(column[label] for column in columns)} |"
        if not number:
            yield "| --- |" + " --- |" * len(columns)


def _curve(learned: dict[tuple[str, int, int], list[float]]) -> Iterator[str]:
    yield ""
    yield "### How fast Forebay learns an engine"
    yield ""
    yield (
        "Predicted over measured seconds of a cold prompt on the idle engine, by the number of "
        "prefills there: median over the runs above."
    )
    yield ""
    yield "| GPU, prompt tokens | " + " | ".join(map(str, COUNTS)) + " |"
    yield "| --- |" + " --- |" * len(COUNTS)
    for gpu in GPUS:
        for size in SIZES:
            cells = []
            for count in COUNTS:
                found = learned.get((gpu, count, size), [])
                cells.append(f"{median(found):.2f}" if found else "-")
            yield f"| {gpu.upper()}, {size:,} | " + " | ".join(cells) + " |"


# Agent sessions.


def blocks_of(row: TraceRequest) -> tuple[int, ...]:
    """The full blocks of a prompt."""
    return (row.blocks or ())[: row.input_tokens // row.block_tokens]


def infinite_ratio(rows: Rows) -> float:
    cache = IdealCache()
    return sum(cache.look_up(row).hit_tokens for row in rows) / sum(r.input_tokens for r in rows)


def pooled_ratio(rows: Rows, capacity: int) -> float:
    """Hit ratio of one cache with so many blocks that gives up the least recently used one."""
    index, hits = PrefixIndex(capacity), 0
    for row in rows:
        blocks, size = blocks_of(row), row.block_tokens
        hits += min(index.match(blocks) * size, row.input_tokens - 1)
        index.touch(blocks, (row.output_tokens + row.input_tokens % size) / size)
    return hits / sum(row.input_tokens for row in rows)


def sessions(seeds: int) -> Iterator[str]:
    """The tables of agent sessions."""
    yield "## Long agent sessions"
    yield ""
    yield (
        f"`forebay traces synth agent-sessions` on four H200s with Llama-3-8B's shapes; {seeds} "
        "seeds of 40 minutes. Hit ratio of served requests, mean of the seeds; TTFT of all "
        "requests, in seconds. Losses are points of Forebay's hit ratio. "
        "*Infinite*: a cache that evicts nothing. *LRU*: one cache as large as the four together."
    )
    yield ""
    yield ("*Pinned sessions*: a variant of Forebay with which each session stays on its engine.")
    columns = []
    for rate in RATES:
        load = long_sessions(rate)
        played: dict[str, list[Played]] = {}
        bounds: dict[str, list[float]] = {"infinite": [], "LRU": []}
        for seed in range(seeds):
            rows = rows_of(load, seed, SHARED)
            tokens = sum(served_engine(config).kv_tokens for config in load.engines)
            capacity = int(tokens / rows[0].block_tokens)
            bounds["infinite"].append(infinite_ratio(rows))
            bounds["LRU"].append(pooled_ratio(rows, capacity))
            for name in (FOREBAY, HOME, SMG[0], "lmetric", "dynamo"):
                played.setdefault(name, []).append(play(load, rows, seed, name))
        columns.append(dict(_session_cells(rate, bounds, played)))
    yield ""
    yield from _side_by_side(columns)


def _session_cells(
    rate: float, bounds: dict[str, list[float]], played: dict[str, list[Played]]
) -> Iterator[tuple[str, str]]:
    """Yield the labels and cells of a rate's column, the head first."""
    count = len(joined(played[FOREBAY]).ttft_s)
    yield "hit ratio; p50, p90, p99", f"{rate:g} sessions/s, {count:,} requests"
    for name, ratios in bounds.items():
        yield f"*{name}*", f"{fmean(ratios):.4f}"
    for name, parts in played.items():
        label = f"Forebay, {name}" if name == HOME else name
        hits, all_of = fmean(p.hit_ratio() for p in parts), joined(parts)
        times = ", ".join(shown(quantile(all_of.ttft_s, share)) for share in (0.5, 0.9, 0.99))
        rejected = 100 * all_of.refused.mean()
        yield label, f"{hits:.4f}; {times}" + (f"; {rejected:.2f} % rejected" if rejected else "")
    ours, most = fmean(p.hit_ratio() for p in played[FOREBAY]), fmean(bounds["infinite"])
    lru = fmean(bounds["LRU"])
    # Points of the hit ratio that Forebay loses, by cause.
    yield "lost to evictions", f"{100 * (most - lru):.2f}"
    yield "lost to routing and to several caches", f"{100 * (lru - ours):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    parser.add_argument("--write", action="store_true", help="write bench-fleets.md")
    options = parser.parse_args()
    lines = [
        "# Mixed fleets and agent sessions",
        "",
        "Written by `python tests/bench/fleets.py --write`: virtual time, exact for a seed. The",
        "others are **models** of other routers (`replay/sim/routers/models.py`). A request is in",
        "time as in [highest load](bench-policies.md#how-it-is-measured).",
        "",
    ]
    for part in (mixed(options.seeds, options.data), sessions(options.seeds)):
        for line in part:
            lines.append(line)
            print(line, flush=True)
        lines.append("")
        print()
    if options.write:
        (BENCHMARKS / "bench-fleets.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
