"""The shaper and the trace that the simulator and the driver are compared with."""

import random

from forebay.proxy.core.model import BackendSpec, Bucket
from forebay.proxy.core.shaper import Shaper
from forebay.traces.ground.schema import TraceRequest

NAMES = ("a", "b")


def a_shaper(*, priority: bool = False) -> Shaper:
    return Shaper(
        [BackendSpec(name, 8, priority=priority) for name in NAMES],
        [
            Bucket("chat", 5_000, max_queue=8, max_wait_s=2.0),
            Bucket("document", 131_072, max_queue=4, max_wait_s=30.0, prefills_per_backend=1),
        ],
    )


def a_trace(seed: int, n: int = 250) -> list[TraceRequest]:
    rng = random.Random(seed)
    at, trace = 0.0, []
    for i in range(n):
        at += rng.expovariate(4.0)
        if rng.random() < 0.2:
            document, tokens = rng.randrange(6), rng.choice([30_000, 60_000, 110_000])
            blocks = (*range(document * 1_000, document * 1_000 + tokens // 512), 10**6 + i)
            tokens = len(blocks) * 512 - 100
        else:
            tokens = rng.randint(20, 4_000)
            blocks = tuple(range(10**7 + 100 * i, 10**7 + 100 * i + -(-tokens // 512)))
        trace.append(TraceRequest(str(i), at, tokens, rng.randint(1, 150), blocks))
    return trace
