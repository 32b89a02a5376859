"""Measure the speed of this machine relative to the one on which the targets were set.

There, three operations of one thread took so long on a chat body of 441 KB; here they are timed
beside the routers, in every round, so a figure can be read at the speed that its target is for.
"""

import hashlib
import json
import random
import time
from collections.abc import Callable
from functools import cache
from statistics import median

import orjson

BODY_BYTES = 441_000
TIMES = 5


@cache
def _body() -> bytes:
    """A chat about a long English text, as near as random words come to it."""
    rng = random.Random(1)
    letters = "etaoinshrdlcumwfgypbvk"
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(3000)]
    text = " ".join(rng.choices(words, k=BODY_BYTES // 5))[: BODY_BYTES - 90]
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "mock", "messages": messages, "stream": True}).encode()


OPERATIONS: dict[str, tuple[Callable[[bytes], object], float]] = {
    "json.loads": (json.loads, 335e-6),
    "orjson.loads": (orjson.loads, 93e-6),
    "blake2b": (lambda body: hashlib.blake2b(body).digest(), 300e-6),
}
"""What is timed, and the seconds it took there."""


def reference_ms() -> float:
    """Time a fixed loop of plain Python."""
    started = time.process_time()
    sum(i * i for i in range(1_000_000))
    return (time.process_time() - started) * 1e3


def slower() -> float:
    """CPU time over that of the targets' machine: the median of the operations, just now."""
    body = _body()
    return median(_cpu_s(work, body) / there_s for work, there_s in OPERATIONS.values())


def _cpu_s(work: Callable[[bytes], object], body: bytes) -> float:
    taken = []
    for _ in range(TIMES):
        before = time.thread_time()
        work(body)
        taken.append(time.thread_time() - before)
    return median(taken)
