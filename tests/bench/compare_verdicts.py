"""Measure how often `forebay compare` is wrong, and how long a run must be to see a change.

Each run is a queue of chats beside documents at one server, at 80 % load: latencies come in long
waves, as real ones do (D. V. Lindley, 1952: the recursion of waiting times).

    false verdicts   pairs of runs that differ by chance alone, and in how many p99 is decided
    a true change    the same pairs, with every latency of the second run 10 % longer

A pair is one trace sent twice, whose service times differ by 2 % at random, or two traces.

    python tests/bench/compare_verdicts.py [--pairs 100] [--lengths 2000 10000]
"""

import argparse

import numpy as np

from forebay.analysis.compare.compare import line_of
from forebay.analysis.statistics.quantile_intervals import ratio_interval
from forebay.analysis.statistics.quantiles import Floats, order_statistic

LOAD = 0.8
DOCUMENTS = 1 / 21  # of the requests
CHAT_S, DOCUMENT_S = 0.05, 2.0
NOISE = 0.02
CHANGE = 1.1
SHARE = 0.99


def runs_of(random: np.random.Generator, requests: int, count: int) -> list[Floats]:
    """Return the latencies of the chats of `count` runs of one trace."""
    document = random.random(requests) < DOCUMENTS
    service_s = np.where(document, DOCUMENT_S, CHAT_S * random.lognormal(0.0, 0.3, requests))
    mean_s = DOCUMENTS * DOCUMENT_S + (1.0 - DOCUMENTS) * CHAT_S * float(np.exp(0.045))
    gaps = random.exponential(mean_s / LOAD, requests).tolist()
    runs = []
    for _ in range(count):
        times = service_s * random.lognormal(0.0, NOISE, requests)
        waits, wait_s = np.empty(requests), 0.0
        for at, (takes_s, gap_s) in enumerate(zip(times.tolist(), gaps, strict=True)):
            waits[at] = wait_s
            wait_s = max(0.0, wait_s + takes_s - gap_s)
        runs.append((waits + times)[~document])
    return runs


def verdict(a: Floats, b: Floats, *, paired: bool) -> str | None:
    """Return which run `compare` calls better by its p99."""
    of_a, of_b = (order_statistic(np.sort(values), SHARE) for values in (a, b))
    interval = ratio_interval(a, b, SHARE, paired=paired)
    return line_of("chat", "ttft_p99", "", "s", of_a, of_b, "lower", interval).better


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2_000, 10_000])
    given = parser.parse_args()
    print("| pairs | requests | false verdicts | 10 % longer p99 found |")
    print("| --- | ---: | ---: | ---: |")
    for requests in given.lengths:
        for paired in (True, False):
            false = found = 0
            for number in range(given.pairs):
                random = np.random.default_rng([requests, number, paired])
                if paired:
                    a, b = runs_of(random, requests, 2)
                else:
                    (a,), (b,) = runs_of(random, requests, 1), runs_of(random, requests, 1)
                false += verdict(a, b, paired=paired) in ("a", "b")
                found += verdict(a, CHANGE * b, paired=paired) == "a"
            kind = "one trace" if paired else "two traces"
            print(
                f"| {kind} | {requests:,} | {false} of {given.pairs} | {found} of {given.pairs} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
