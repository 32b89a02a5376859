"""Measure how often `forebay compare` is wrong about runs of the simulator.

Each run is chats beside documents of 120,000 tokens in front of two simulated H200, as `forebay
traces synth chat-beside-documents` makes them. For each seed the trace is played three times:

    a, b     the same policy and engines. As in two real runs, no request of b arrives exactly when
             that of a did: it is up to 4 ms earlier or later, as the schedule lag in README is, and
             the runs part ways
    c        the same as b, with another `--long-prefill-token-threshold` (`--setting`)

False verdicts are those about chats' p99 of a and b. A true change is b with every latency 10 %
longer, or c, whose mean change of p99 is printed, too. Two traces: b and c are of the next seed.

    python tests/bench/compare_simulated.py [--pairs 100] [--requests 2000] [--setting 2304]
"""

import argparse
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
from arena_policies import FOREBAY
from arena_score import CHAT_MOST
from compare_verdicts import CHANGE, SHARE, verdict
from guard import CHUNK, play_rows

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


def ttft_s(rows: list[TraceRequest], engine: EngineConfig) -> dict[str, float]:
    """Return the seconds to the first token of each answered chat, by its id."""
    return {
        outcome.request.id: outcome.ttft_s
        for outcome in play_rows(rows, FOREBAY, engine, ENGINES)
        if outcome.request.input_tokens <= CHAT_MOST and outcome.ttft_s is not None
    }


def of_both(a: dict[str, float], b: dict[str, float]) -> tuple[Floats, Floats]:
    """Return the times of the requests that both runs answered, in the order of the trace."""
    names = [name for name in a if name in b]
    return np.array([a[name] for name in names]), np.array([b[name] for name in names])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--setting", type=int, default=2_304)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    other = replace(ENGINE, long_prefill_token_threshold=given.setting)
    runs = []
    for seed in range(given.first, given.first + given.pairs + 1):
        rows = trace(seed, given.requests)
        moved = jittered(rows, seed)
        runs.append((ttft_s(rows, ENGINE), ttft_s(moved, ENGINE), ttft_s(moved, other)))
    print("| pairs | requests | false verdicts | 10 % longer p99 found | other setting found |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for paired, kind in ((True, "one trace sent twice"), (False, "two traces")):
        false = scaled = changed = 0
        ratios = []
        for number in range(given.pairs):
            first, (_, second, third) = runs[number][0], runs[number + (not paired)]
            if paired:
                (a, b), (of_a, c) = of_both(first, second), of_both(first, third)
            else:
                a, b, c = (np.array(list(times.values())) for times in (first, second, third))
                of_a = a
            false += verdict(a, b, paired=paired) in ("a", "b")
            scaled += verdict(a, CHANGE * b, paired=paired) == "a"
            changed += verdict(of_a, c, paired=paired) == "a"
            p99 = [order_statistic(np.sort(values), SHARE) for values in (of_a, c)]
            ratios.append(p99[1] / p99[0])
        print(
            f"| {kind} | {given.requests:,} | {false} of {given.pairs} | {scaled} of {given.pairs} "
            f"| {changed} of {given.pairs} (p99 {np.median(ratios) - 1:+.0%}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
