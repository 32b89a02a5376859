"""One load of a saturation sweep: its requests, their throughput, and the engine's gauges."""

from collections.abc import Sequence
from itertools import islice
from random import Random
from statistics import median
from typing import Any

from forebay.analysis.experiments.gauges import GaugeSample
from forebay.analysis.experiments.load_stats import percentile, ttfts
from forebay.analysis.experiments.systems import PlayedLoad, Way
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.arrivals import arrival_times

ROUNDS = 5  # requests of a level per request in flight, at least
KV_FULL = 0.9


class Requests:
    """Makes unshared prompts. Output lengths vary by half, so that answers do not end together.

    `least` is the smallest number of requests of a load.
    """

    def __init__(self, prompt_tokens: int, output_tokens: int, seed: int, least: int = 24) -> None:
        self._prompt, self._output, self._seed = prompt_tokens, output_tokens, seed
        self.least = least

    def make(self, load: float, count: int) -> list[TraceRequest]:
        dice = Random(f"{self._seed}:saturation:{load:g}")
        low, high = max(2, self._output // 2), self._output + self._output // 2
        name = f"load-{load:g}"
        return [
            TraceRequest(f"{name}-{i}", 0.0, self._prompt, dice.randint(low, high))
            for i in range(count)
        ]

    def paced(self, rate: float, seconds: float) -> list[TraceRequest]:
        """Poisson arrivals, stretched so that the mean rate is exactly `rate`."""
        rows = self.make(rate, max(self.least, round(rate * seconds)))
        times = list(islice(arrival_times("poisson", rate, self._seed), len(rows)))
        stretch = len(rows) / rate / times[-1]
        return [
            TraceRequest(row.id, at * stretch, row.input_tokens, row.output_tokens)
            for row, at in zip(rows, times, strict=True)
        ]


async def at_concurrency(way: Way, maker: Requests, at_once: int) -> dict[str, Any]:
    """Throughput of the steady part: after one round of answers, before the last is sent."""
    rows = maker.make(at_once, max(maker.least, ROUNDS * at_once))
    load = await way.closed(f"closed-{at_once}", rows, at_once)
    done = sorted(
        (reply.done_s, reply.asked_tokens or 0)
        for reply in load.answered
        if reply.done_s is not None
    )
    start = done[min(at_once, len(done)) - 1][0]
    stop = max(load.due_s)
    within = [tokens for at, tokens in done if start < at <= stop]
    length = stop - start
    steady = length > 0 and len(within) >= at_once / 2
    return _row(
        load,
        at_once,
        len(within) / length if steady else len(done) / done[-1][0],
        sum(within) / length if steady else sum(t for _, t in done) / done[-1][0],
    )


async def at_rate(way: Way, maker: Requests, rate: float, seconds: float) -> dict[str, Any]:
    """Throughput of the middle 80 % of the answers, and of the same part of the arrivals."""
    load = (await way.play(f"rate-{rate:g}", maker.paced(rate, seconds)))[0]
    done, offered = load.done_s, middle_rate(load.due_s)
    # A share of all requests sent: a server that rejects half of them completes half the rate.
    achieved = middle_rate(done) * len(done) / len(load.seen)
    tokens = sum(reply.asked_tokens or 0 for reply in load.answered)
    row = _row(load, rate, achieved, tokens * achieved / len(done))
    return row | {"offered_per_s": offered}


def middle_rate(times_s: Sequence[float]) -> float:
    """Events per second between the 10th and the 90th percentile of time. 0 with too few events.

    The ends are left out, because the first answer comes late and the last may be long.
    """
    ordered = sorted(times_s)
    first, last = len(ordered) // 10, len(ordered) - 1 - len(ordered) // 10
    span = ordered[last] - ordered[first] if last > first else 0.0
    return (last - first) / span if span > 0 else 0.0


def _row(load: PlayedLoad, level: float, per_s: float, tokens_per_s: float) -> dict[str, Any]:
    samples = load.samples
    times = ttfts(load.seen)
    return {
        "load": level,
        "requests_per_s": per_s,
        "tokens_per_s": tokens_per_s,
        "ttft_s": median(times),
        "ttft_p95_s": percentile(times, 95),
        "ttft_p99_s": percentile(times, 99),
        "tpot_s": median(
            [reply.tpot_s for reply in load.seen if reply.tpot_s is not None] or [0.0]
        ),
        "running": max((sample.running for sample in samples), default=None),
        "waiting": max((sample.waiting for sample in samples), default=None),
        "kv_share": max((sample.kv_share for sample in samples), default=None),
        "seats": seats_seen(samples),
        "rejected": load.count("rejected"),
        "failed": load.count("failed"),
        "verdict": load.verdict,
    }


def seats_seen(samples: Sequence[GaugeSample]) -> int | None:
    """The most running requests while others waited with free KV cache, or None.

    Only max_num_seqs keeps them waiting then. Prefills keep requests waiting too, so the number
    counts only if three samples show it.
    """
    running = [sample.running for sample in samples if sample.waiting and sample.kv_share < KV_FULL]
    most = max(running, default=0)
    return most if running.count(most) >= 3 else None
