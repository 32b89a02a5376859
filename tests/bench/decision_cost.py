"""How much longer does a decision take with many waiting requests, tenants and backends?

    python tests/bench/decision_cost.py

Processor time of one arrival that waits and is cancelled, and of one request that ends and lets
the next one start: the median of many, in microseconds, and as a multiple of the first line in the
same run. Backends are full, and the KV cache of each holds 64 requests. Plain Python unless
PYTHONPATH=.compiled is set.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from statistics import median
from typing import Any, NamedTuple

from forebay.proxy.core.model import Action, BackendSpec, Bucket, Request, Send
from forebay.proxy.core.shaper import Shaper

SLOTS, EVENTS = 64, 80
PATIENT_S = 1e6  # no request is rejected or leaves because of its wait
TOKENS = 600


class Load(NamedTuple):
    """A state of the proxy. `limit`: requests that may wait; `mixed`: prompts differ in length."""

    name: str
    waiting: int
    tenants: int = 0
    backends: int = 2
    mixed: bool = True
    limit: int = 20_000


LOADS = (
    Load("100 wait", 100),
    Load("10,000 wait", 10_000),
    Load("100 wait, one tenant", 100, 1),
    Load("10,000 wait, one tenant", 10_000, 1),
    Load("10,000 equal prompts of one tenant", 10_000, 1, mixed=False),
    Load("100 wait from 100 tenants", 100, 100),
    Load("10,000 wait from 10,000 tenants", 10_000, 10_000),
    Load("10,000 wait from 10,000 tenants, full", 10_000, 10_000, limit=10_000),
    Load("100 wait, 500 backends", 100, 0, 500),
    Load("10,000 wait from 10,000 tenants, 500 backends", 10_000, 10_000, 500),
)


class Crowd:
    """A shaper with all backends full and `waiting` requests behind them."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.numbers = count()
        self.now = 0.0
        buckets = (
            Bucket("chat", 5_000, load.limit, PATIENT_S),
            Bucket("document", 131_072, load.limit, 2 * PATIENT_S, 1),
        )
        specs = [BackendSpec(f"b{number}", SLOTS) for number in range(load.backends)]
        self.shaper = Shaper(specs, buckets)
        self.running: list[str] = []
        for spec in specs:
            self.do(self.shaper.backend_up(spec.name, 0.0))
        while len(self.running) < SLOTS * load.backends or self.waiting() < load.waiting:
            self.now += 0.001
            self.do(self.shaper.arrive(self.request(), self.now))

    def waiting(self) -> int:
        return len(self.shaper._state.queues.waiting)

    def request(self) -> Request:
        number, load = next(self.numbers), self.load
        tokens = 100 + number * 7_919 % 4_000 if load.mixed else TOKENS
        tenant = f"t{number % load.tenants}" if load.tenants else ""
        first = 1_000 * number + 1 if load.mixed else 1
        blocks = tuple(range(first, first + tokens // 512))
        return Request(f"r{number}", tokens, 200, blocks, 512.0, timeout_s=inf, tenant=tenant)

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.running.append(action.request.id)
                self.do(self.shaper.first_token(action.request.id, self.now))

    def arrive_and_leave(self) -> float:
        """Return the microseconds of an arrival that waits or is rejected."""
        self.now += 0.01
        request = self.request()
        took_s, actions = timed(self.shaper.arrive, request, self.now)
        if not actions:
            self.shaper.cancel(request.id, self.now)
        return took_s

    def end(self) -> float:
        """Return the microseconds of a request that ends, and lets another one start."""
        self.now += 0.01
        took_s, actions = timed(self.shaper.finish, self.running.pop(0), self.now)
        self.do(actions)
        return took_s


def timed(do: Callable[..., Any], *words: Any) -> tuple[float, Any]:
    began = time.thread_time()
    result = do(*words)
    return 1e6 * (time.thread_time() - began), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--loads", type=int, nargs="*", help="numbers of lines, from 0; all if none"
    )
    options = parser.parse_args()
    first: tuple[float, float] | None = None
    print("| load | arrival, µs | times | end, µs | times | made in, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for number, load in enumerate(LOADS):
        if options.loads and number not in options.loads:
            continue
        began = time.process_time()
        crowd = Crowd(load)
        made_s = time.process_time() - began
        arrival = median([crowd.arrive_and_leave() for _ in range(EVENTS)])
        end = median([crowd.end() for _ in range(EVENTS)])
        first = first or (arrival, end)
        print(
            f"| {load.name} | {arrival:.0f} | {arrival / first[0]:.2f} "
            f"| {end:.0f} | {end / first[1]:.2f} | {made_s:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
