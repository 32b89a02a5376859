"""Measure the cost of tenant isolation, and check that it holds.

    python tests/bench/security.py

Prints the CPU time that key, salt and splice add to a request (best of 15 rounds), and for two
tenants with the same 8k-token prompts in front of two simulated engines (virtual time): the hits
across tenants, the spy's TTFT for prompts that were and were not asked before, and the
Kolmogorov-Smirnov p of the two, with isolation and, to see that it would be seen, without.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import thread_time

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from aiohttp.test_utils import make_mocked_request
from cache_spy import KEYS, Spy, ks_p

from forebay.proxy.api.body import read_fields
from forebay.proxy.api.cache_salt import CacheSalts
from forebay.proxy.api.dialects import CHAT
from forebay.proxy.api.json_body import parse
from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.security.auth import Authenticator
from forebay.proxy.security.keys import parse_keys
from forebay.replay.clock.virtual_loop import run

SAMPLES = 200
ROUNDS = 15


def microseconds(call: Callable[[], object], times: int) -> float:
    def one_round() -> float:
        start = thread_time()
        for _ in range(times):
            call()
        return (thread_time() - start) / times * 1e6

    return min(one_round() for _ in range(ROUNDS))


def costs() -> None:
    ring = parse_keys("\n".join(f"t{i}: sk-key-of-tenant-{i:08d}" for i in range(1000)), "keys")
    auth = Authenticator(ring)
    request = make_mocked_request(
        "POST", "/", headers={"authorization": "Bearer sk-key-of-tenant-00000500"}
    )
    print(f"key of 1000: {microseconds(lambda: auth.tenant(request, 0.0), 20_000):.2f} us")
    salts = CacheSalts(b"a secret of the bench", {})
    print(
        f"salt alone: {microseconds(lambda: salts.salt('t500'), 20_000):.2f} us, of a client that "
        f"gives one too: {microseconds(lambda: salts.salt('t500', 'u'), 20_000):.2f} us"
    )
    estimate = TokenEstimate(4.0)
    for size in (4_000, 400_000):
        text = " ".join(f"w{i * 31 % 997}" for i in range(size // 5))[:size]
        body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()

        def understood(tenant: str, given: CacheSalts | None, body: bytes = body) -> object:
            return read_fields(
                parse(body),
                body,
                {},
                id_="r",
                dialect=CHAT,
                estimate=estimate,
                block_bytes=2048,
                tenant=tenant,
                salts=given,
            )

        times = 4_000_000 // size
        plain = microseconds(lambda: understood("", None), times)
        salted = microseconds(lambda: understood("t500", salts), times)
        print(
            f"{len(body)} bytes: read {plain:.1f} us, with salt {salted:.1f} us: "
            f"{salted - plain:+.1f} us"
        )


def side_channel() -> None:
    os.environ["KEYS"] = KEYS
    for isolate, engines in ((True, 2), (True, 1), (False, 1)):
        spy = Spy(isolate, engines)
        run(spy.play(SAMPLES))
        asked, new = spy.ttft_s["asked before"], spy.ttft_s["new"]
        print(
            f"isolate_cache {isolate}, {engines} engines, n = {SAMPLES}: hits across tenants "
            f"{sum(c > 0 for c in spy.cached['asked before'])}, TTFT asked before "
            f"{median(asked) * 1e3:.2f} ms, new {median(new) * 1e3:.2f} ms, "
            f"KS p = {ks_p(asked, new):.3g}"
        )


if __name__ == "__main__":
    costs()
    side_channel()
