"""Measure how many requests the simulator plays in a second of one core, with the live policy.

    make bench-sim      plain Python, then compiled (FOREBAY_COMPILE=1)

Only the processor time of `simulate` counts: not making the trace, not reading the results. The
time of the reference loop shows how fast the machine is at that moment.
"""

import argparse
import platform
import random
import statistics
from collections.abc import Callable
from importlib.metadata import version

from routers.machine import reference_ms

from forebay.proxy.core import shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.traces.ground.schema import TraceRequest

CHAT_RATE_PER_GPU = 10.0  # requests a second
MIX_RATE_PER_GPU = 0.5
DOCUMENT_SHARE = 0.1
DOCUMENT_TOKENS = 120_000
DOCUMENTS = 200


def chat(count: int, gpus: int, seed: int) -> list[TraceRequest]:
    """Make prompts of about 1,024 tokens that share nothing, with answers of about 200."""
    rng, at = random.Random(seed), 0.0
    rows = []
    for number in range(count):
        at += rng.expovariate(CHAT_RATE_PER_GPU * gpus)
        rows.append(_chat_row(number, at, rng))
    return rows


def mix(count: int, gpus: int, seed: int) -> list[TraceRequest]:
    """Make the same chats, and one request in ten about one of 200 documents (Zipf)."""
    rng, at = random.Random(seed), 0.0
    weights = [1 / (rank + 1) for rank in range(DOCUMENTS)]
    rows = []
    for number in range(count):
        at += rng.expovariate(MIX_RATE_PER_GPU * gpus)
        if rng.random() < DOCUMENT_SHARE:
            first = 1_000 * rng.choices(range(DOCUMENTS), weights)[0]
            ids = (*range(first, first + DOCUMENT_TOKENS // 512), 10**9 + number)
            rows.append(TraceRequest(str(number), at, DOCUMENT_TOKENS, 200, ids))
        else:
            rows.append(_chat_row(number, at, rng))
    return rows


def _chat_row(number: int, at: float, rng: random.Random) -> TraceRequest:
    first = 10**12 + 8 * number
    prompt, output = max(20, int(rng.gauss(1024, 200))), max(2, int(rng.gauss(200, 50)))
    return TraceRequest(str(number), at, prompt, output, tuple(range(first, first + 5)))


WORKLOADS: dict[str, tuple[Callable[[int, int, int], list[TraceRequest]], int]] = {
    "chat": (chat, 2),
    "chat on 64": (chat, 64),
    "mix on 64": (mix, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    compiled = not shaper.__file__.endswith(".py")
    print(
        f"forebay {version('forebay')}, Python {platform.python_version()}, "
        f"{'compiled' if compiled else 'plain Python'}; {options.requests} requests, median of "
        f"{options.runs} seeds (slowest to fastest); reference loop {reference_ms():.0f} ms"
    )
    for name, (make, gpus) in WORKLOADS.items():
        speeds, rejected = [], 0
        for seed in range(options.runs):
            trace = make(options.requests, gpus, seed)
            done = simulate(trace, Scenario(EngineConfig(), gpus))
            speeds.append(len(trace) / done.cpu_s)
            rejected += sum(o.reject is not None for o in done.outcomes)
        print(
            f"  {name:<11} {gpus:3d} GPUs  {statistics.median(speeds):8,.0f} requests/s "
            f"({min(speeds):,.0f} to {max(speeds):,.0f}); {rejected} rejected"
        )


if __name__ == "__main__":
    main()
