"""Damaged requests by the million, on the loop of production and in real time (goal 16).

    python tests/bench/soak_framing.py --mutants 1000000 --seed 0

Says how many were answered how, and fails on the first batch after which the backend has received
anything dirty, or a request whose answer no client got.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import uvloop
from mutants import mutant
from proxy_stage import settle, stage
from raw_client import Oracle, Response, raw, responses

from forebay.proxy.http1.server import server as http_server

BATCH, AT_ONCE = 2000, 200
PATIENCE_S = 60.0  # the proxy closes every connection long before


def answers_to(sent: bytes, data: bytes) -> list[Response]:
    """Parse the answers to a mutant; each error has its JSON.

    An answer to HEAD has a length and no body, and only the server knows which request was one.
    """
    for methods in product(("", "HEAD"), repeat=3) if b"HEAD" in sent else [()]:
        try:
            found = responses(data, *methods)
            for number, one in enumerate(found):
                assert one.status < 400 or "HEAD" in methods[number : number + 1] or one.error
        except (AssertionError, ValueError) as error:
            fault: Exception = error
        else:
            return found
    raise fault


async def soak(count: int, seed: int) -> None:
    began, done, statuses = time.monotonic(), 0, Counter[int]()
    http_server.KEEPALIVE_S = 0.3
    timeouts = {"client_headers": "0.3s", "client_body": "0.3s"}
    async with Oracle().running() as oracle, stage([oracle.url], timeouts=timeouts) as on:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> list[Response]:
            async with limit:
                parts = mutant(random.Random(f"{seed}/{number}").randrange)
                data = await raw(on, *parts, pause_s=0.001, patience_s=PATIENCE_S)
                return answers_to(b"".join(parts), data)

        while done < count:
            numbers = range(done, min(count, done + BATCH))
            oracle.requests.clear()
            answers = [a for each in await asyncio.gather(*map(one, numbers)) for a in each]
            passed = Counter(r.headers["x-request-id"].lower() for r in oracle.requests)
            answered = Counter(a.headers["x-request-id"] for a in answers if a.status == 200)
            where = f"seed {seed}, mutants {numbers.start} to {numbers.stop - 1}"
            assert not oracle.dirty, f"{where}: {oracle.dirty[0]!r}"
            assert not passed - answered, f"{where}: {passed - answered}"
            statuses.update(answer.status for answer in answers)
            done = numbers.stop
        await settle()
        on.assert_nothing_held()
        assert not on.said[1:], on.said
    print(
        f"{done:,} mutants in {time.monotonic() - began:.0f} s: 0 dirty or extra requests; "
        f"answers {dict(sorted(statuses.items()))}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(soak(arguments.mutants, arguments.seed))
