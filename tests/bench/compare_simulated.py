"""Measure how often `forebay compare` is wrong about runs of the simulator.

Each run is chats beside documents of 120,000 tokens in front of two simulated H200, as `forebay
traces synth chat-beside-documents` makes them. For each seed the trace is played three times:

    a, b     the same policy and engines. As in two real runs, no request of b arrives exactly when
             that of a did: it is up to 4 ms earlier or later, as the schedule lag in README is, and
             the runs part ways
    c        the same as b, with another `--long-prefill-token-threshold` (`--setting`)

False verdicts are those about chats' p99 of a and b. A true change is b with every latency 10 %
longer, or c, whose mean change of p99 is printed, too. Two traces: b and c are of the next seed.
Shorter runs are stretches of the long ones, and there are more of them.

    python tests/bench/compare_simulated.py [--pairs 100] [--requests 30000] [--lengths 2000 30000]
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from arena_policies import FOREBAY
from arena_score import CHAT_MOST
from compare_verdicts import CHANGE, SHARE, verdict
from guard import CHUNK, play_rows
from numpy.typing import NDArray

from forebay.analysis.statistics.quantiles import Floats, order_statistic
from forebay.replay.engine.config import EngineConfig
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents

ENGINE = replace(EngineConfig(), long_prefill_token_threshold=CHUNK)
ENGINES = 2
JITTER_S = 0.004
SPEC = ChatBesideDocuments(duration_s=1e6)


def trace(seed: int, requests: int) -> list[TraceRequest]:
    return list(islice(chat_beside_documents(replace(SPEC, seed=seed)), requests))


def jittered(rows: list[TraceRequest], seed: int) -> list[TraceRequest]:
    random = np.random.default_rng([seed, len(rows)])
    moved = random.uniform(-JITTER_S, JITTER_S, len(rows)).tolist()
    return sorted(
        (
            replace(row, arrival_s=max(0.0, row.arrival_s + by))
            for row, by in zip(rows, moved, strict=True)
        ),
        key=lambda row: row.arrival_s,
    )


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds to the first token of the answered chats of a run, by their place in the trace."""

    places: NDArray[np.int64]
    seconds: Floats

    def stretch(self, first: int, length: int) -> "Times":
        inside = (self.places >= first) & (self.places < first + length)
        return Times(self.places[inside], self.seconds[inside])

    def beside(self, other: "Times") -> tuple[Floats, Floats]:
        """Return the times of the requests that both runs answered, in the order of the trace."""
        return (
            self.seconds[np.isin(self.places, other.places)],
            other.seconds[np.isin(other.places, self.places)],
        )


def played(rows: list[TraceRequest], places: dict[str, int], engine: EngineConfig) -> Times:
    found = sorted(
        (places[outcome.request.id], outcome.ttft_s)
        for outcome in play_rows(rows, FOREBAY, engine, ENGINES)
        if outcome.request.input_tokens <= CHAT_MOST and outcome.ttft_s is not None
    )
    return Times(np.array([place for place, _ in found]), np.array([time for _, time in found]))


def runs_of(seed: int, requests: int, setting: int) -> tuple[Times, Times, Times]:
    rows = trace(seed, requests)
    moved, places = jittered(rows, seed), {row.id: place for place, row in enumerate(rows)}
    other = replace(ENGINE, long_prefill_token_threshold=setting)
    return (
        played(rows, places, ENGINE),
        played(moved, places, ENGINE),
        played(moved, places, other),
    )


@dataclass(slots=True)
class Counts:
    """Verdicts on pairs of runs of one length, and the change of p99 by the other setting."""

    pairs: int = 0
    false: int = 0
    scaled: int = 0
    changed: int = 0
    ratios: list[float] = field(default_factory=list)

    def add(self, runs: Sequence[Times], *, paired: bool) -> None:
        first, second, third = runs
        a, b = first.beside(second) if paired else (first.seconds, second.seconds)
        of_a, c = first.beside(third) if paired else (first.seconds, third.seconds)
        self.pairs += 1
        self.false += verdict(a, b, paired=paired) in ("a", "b")
        self.scaled += verdict(a, CHANGE * b, paired=paired) == "a"
        self.changed += verdict(of_a, c, paired=paired) == "a"
        before, after = (order_statistic(np.sort(values), SHARE) for values in (of_a, c))
        self.ratios.append(after / before)

    def line(self, kind: str, length: int) -> str:
        cells = (f"{count} of {self.pairs}" for count in (self.false, self.scaled, self.changed))
        change = float(np.median(self.ratios)) - 1.0
        return f"| {kind} | {length:,} | {' | '.join(cells)} (p99 {100.0 * change:+.0f} %) |"


def table(runs: Sequence[tuple[Times, Times, Times]], length: int, requests: int) -> Iterator[str]:
    """Compare the stretches of this length. Two traces are neighbouring seeds."""
    for paired, kind in ((True, "one trace sent twice"), (False, "two traces")):
        counts = Counts()
        for number in range(len(runs) - 1):
            first, (_, second, third) = runs[number][0], runs[number + (not paired)]
            for start in range(0, requests - length + 1, length):
                counts.add(
                    [run.stretch(start, length) for run in (first, second, third)], paired=paired
                )
        yield counts.line(kind, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_000, 8_000, 30_000])
    parser.add_argument("--setting", type=int, default=2_304)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.pairs + 1)
    runs = [runs_of(seed, given.requests, given.setting) for seed in seeds]
    print("| pairs | requests | false verdicts | 10 % longer p99 found | other setting found |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for length in given.lengths:
        for line in table(runs, length, given.requests):
            print(line, flush=True)


if __name__ == "__main__":
    main()
