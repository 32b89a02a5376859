r"""Measure how well the proxy knows the engines' prefix caches: believed, corrected and exact.

    python tests/bench/prefix_index.py [--mooncake FILE] [--requests N] [--seeds N] \
        [--first-seed N] [--pool 96k] [--case "pool unknown"]

Each row is one fleet in virtual time. Every engine step is computed. Believed: blocks that were
sent are taken to be cached, up to the size of the KV pool. Corrected: answers also report how much
of each prompt was cached. Exact: KV events report which blocks are stored and removed. The error
is the predicted cache hit, when the request was sent, minus the engine's hit, in tokens.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

from forebay.proxy.core.learn.engine_blocks import BlockTranslations, EngineBlocks
from forebay.proxy.core.learn.prefix_cache import PrefixError
from forebay.proxy.core.model import Action, BackendSpec, Send
from forebay.proxy.core.model import Request as Asked
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.tokenizer import hashes_of_ids
from forebay.replay.sim.engine.served import ServedEngine
from forebay.replay.sim.engine.stepping import SteppingEngine
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.replay.sim.scenario import Scenario
from forebay.replay.sim.workload import SimWorkload as Source
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.documents import Workload, workload
from forebay.traces.synth.lengths import Lognormal

MODES = ("believed", "corrected", "exact")
ENGINES = 2
OTHERS = "other-"  # prefix of the ids of requests that do not come through the proxy


class CacheListener:
    """Updates an index at once with every change of an engine's cache."""

    def __init__(self, held: EngineBlocks) -> None:
        self._held = held

    def stored(self, request: EngineRequest, first: int, stop: int) -> None:
        self._held.stored([request.hash_at(index) for index in range(first, stop)])

    def removed(self, block_hash: int) -> None:
        self._held.removed((block_hash,))

    def cleared(self) -> None:
        self._held.cleared()


class MisinformedShaper(Shaper):
    """A shaper with missing or wrong information, or with traffic that bypasses it."""

    def __init__(self, case: "PrefixCase", *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._case = case
        self._names = list(self.backends)
        self._bypassing = 0

    def backend_up(
        self,
        name: str,
        now: float,
        kv_tokens: float | None = None,
        most_prefills: float = inf,
    ) -> list[Action]:
        reported = None if self._case.pool_unknown else kv_tokens
        return super().backend_up(name, now, reported, most_prefills)

    def arrive(self, request: Asked, now: float) -> list[Action]:
        if request.id.startswith(OTHERS):  # these bypass the proxy and go to the engines in turn
            self._bypassing += 1
            name = self._names[self._bypassing % len(self._names)]
            return [Send(request, name, "", 0.0, 0.0, 0)]
        most = int(request.output_tokens * self._case.most_output)
        return super().arrive(request.with_(output_tokens=most), now)

    def finish(self, request_id: str, now: float) -> list[Action]:
        return [] if request_id.startswith(OTHERS) else super().finish(request_id, now)


class PrefixRun:
    """One run: its outcomes and the errors of the predictions."""

    def __init__(
        self, trace: Sequence[TraceRequest], config: EngineConfig, mode: str, case: "PrefixCase"
    ) -> None:
        if case.others:
            trace = with_others(trace, case.others)
        scenario = Scenario(config, ENGINES)
        stepping = {f"gpu{number}": SteppingEngine(config) for number in range(ENGINES)}
        engines = {n: ServedEngine(steps, config.api_server()) for n, steps in stepping.items()}
        shaper = MisinformedShaper(
            case,
            [BackendSpec(name, 64) for name in engines],
            scenario.proxy.core_buckets(),
            affinity=scenario.proxy.core_affinity(),
        )
        self._block_size = config.limits().block_size
        self._translations = BlockTranslations(self._block_size)
        self._rows = {row.id: row for row in trace}
        self._predicted: dict[str, int] = {}
        self._exact = mode == "exact"
        if self._exact:
            for name, engine in stepping.items():
                held = EngineBlocks(self._translations)
                held.cleared()  # the engine has just started
                shaper.backends[name].cache.engine_blocks = held
                engine.core.pool.observer = CacheListener(held)
        fleet = Fleet(shaper, engines, self._decided, tells_cached=mode != "believed")
        self.outcomes = fleet.run(trace)
        self.error = PrefixError()
        for outcome in self.outcomes:
            if outcome.first_token_s is not None and outcome.request.id in self._predicted:
                row = outcome.request
                predicted = self._predicted[row.id]
                self.error.add(predicted, outcome.cached_tokens, row.block_tokens)

    def _decided(self, now: float, action: Action) -> None:
        if not isinstance(action, Send):
            return
        request = action.request
        if request.id.startswith(OTHERS):
            return
        self._predicted[request.id] = action.matched_tokens
        if self._exact and self._translations.wanted(request.blocks):
            row = self._rows[request.id]
            keys = hashes_of_ids(
                row.blocks or (), row.block_tokens, row.input_tokens - 1, self._block_size
            )
            self._translations.learn(request.blocks, keys, row.block_tokens)

    def ours(self) -> list[SimOutcome]:
        """List the requests that the proxy sent."""
        return [o for o in self.outcomes if o.request.id in self._predicted]

    def hit_ratio(self) -> float:
        ours = self.ours()
        return sum(o.cached_tokens for o in ours) / sum(o.request.input_tokens for o in ours)

    def ttft_s(self, share: float) -> float:
        times = sorted(t for o in self.ours() if (t := o.ttft_s) is not None)
        return times[min(len(times) - 1, int(share * len(times)))] if times else nan

    def rejected(self) -> int:
        return sum(o.reject is not None for o in self.outcomes)


@dataclass(frozen=True, slots=True)
class PrefixCase:
    """Information that the proxy lacks.

    Attributes:
        others: requests a second that bypass the proxy.
        pool_unknown: the proxy does not know the size of the KV pool.
        most_output: `max_tokens` as a multiple of the tokens that are generated.
    """

    name: str
    others: float = 0.0
    pool_unknown: bool = False
    most_output: float = 1.0


CASES = (
    PrefixCase("all known"),
    PrefixCase("max_tokens x8", most_output=8.0),
    PrefixCase("pool unknown", pool_unknown=True),
    PrefixCase("others' traffic", others=1.5),
)


def with_others(trace: Sequence[TraceRequest], rate_per_s: float) -> list[TraceRequest]:
    """Add prompts of 4,096 tokens that share nothing to the trace."""
    rng, at, rows, number = Random(7), 0.0, list(trace), 0
    while (at := at + rng.expovariate(rate_per_s)) < trace[-1].arrival_s:
        number += 1
        ids = tuple(range(10**15 + 8 * number, 10**15 + 8 * number + 8))
        rows.append(TraceRequest(f"{OTHERS}{number}", at, 4_096, 100, ids))
    return sorted(rows, key=lambda row: row.arrival_s)


def documents(seed: int, count: int) -> Iterator[TraceRequest]:
    """Make a trace of users who ask about 40 documents (median 12k tokens), and chat."""
    return workload(
        Workload(
            documents=40, chat_share=0.3, rate_per_s=3.0, duration_s=None, requests=count,
            document_tokens=Lognormal(12_000, 0.7, 4_096, 100_000), instruction_tokens=512,
            seed=seed,
        )
    )  # fmt: skip


def mooncake(path: Path, count: int, context: int) -> list[TraceRequest]:
    """Read the first requests of a Mooncake trace, slowed to a pace that two engines sustain."""
    rows = Source(path, too_long="drop").source(context)
    return [replace(row, arrival_s=row.arrival_s * 2.0) for row in islice(rows, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mooncake", type=Path, help="a Mooncake trace, .jsonl")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--pool", choices=("96k", "320k"), action="append")
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append")
    options = parser.parse_args()
    # 16 tokens a block: 6,000 blocks hold about seven of the documents, 20,000 twenty-four.
    pools = {"pool 96k": 6_000, "pool 320k": 20_000}
    print(
        f"{'trace':<40} {'index':<10} {'mean error':>10} {'bias':>8} {'within a block':>14} "
        f"{'hit ratio':>9} {'TTFT p50':>8} {'p99':>7} {'rejected':>8}"
    )
    for pool, blocks in pools.items():
        if options.pool and pool.removeprefix("pool ") not in options.pool:
            continue
        config = EngineConfig(num_gpu_blocks_override=blocks, max_model_len=90_000)
        context = config.context
        traces = {
            f"documents {pool}": [
                [r for r in documents(s, options.requests) if r.input_tokens < context - 2_000]
                for s in range(options.first_seed, options.first_seed + options.seeds)
            ]
        }
        if options.mooncake:
            traces[f"mooncake {pool}"] = [mooncake(options.mooncake, options.requests, context)]
        for name, runs in traces.items():
            for case in CASES:
                if options.case and case.name not in options.case:
                    continue
                for mode in MODES:
                    title = f"{name}, {case.name}"
                    row([PrefixRun(trace, config, mode, case) for trace in runs], title, mode)


def row(played: Sequence[PrefixRun], name: str, mode: str) -> None:
    def mean(values: Iterator[float]) -> float:
        return statistics.fmean(values)

    print(
        f"{name:<40} {mode:<10} {mean(p.error.mean_tokens for p in played):>10,.0f} "
        f"{mean(p.error.bias_tokens for p in played):>+8,.0f} "
        f"{mean(p.error.within_block_share for p in played):>14.1%} "
        f"{mean(p.hit_ratio() for p in played):>9.3f} "
        f"{mean(p.ttft_s(0.5) for p in played):>8.3f} {mean(p.ttft_s(0.99) for p in played):>7.2f} "
        f"{mean(float(p.rejected()) for p in played):>8.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
