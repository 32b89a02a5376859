"""A backend that was slow is tried again, and used once it is fast."""

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import BackendSpec, Bucket, Request
from forebay.proxy.core.shaper import Shaper

CHATS, EVERY_S, MINUTE = 1_200, 0.5, 120


def used(prefill_s: Callable[[str, float], float]) -> list[str]:
    """The backends of chats of ten minutes, if a prefill at a time takes so long there."""
    specs = [BackendSpec(name, 64) for name in ("gpu0", "gpu1")]
    shaper = Shaper(specs, [Bucket("chat", 5_000)], recorder=DecisionRecorder(CHATS))
    for spec in specs:
        shaper.backend_up(spec.name, 0.0)

    chosen, events = [], list[tuple[float, int, str]]()
    for number in range(CHATS):
        now = EVERY_S * number
        while events and events[0][0] <= now:
            at, ends, name = heappop(events)
            (shaper.finish if ends else shaper.first_token)(name, at)
        name = str(number)
        shaper.arrive(Request(name, 1_000), now)
        receipt = shaper.recorder.receipts.find(name)
        assert receipt is not None
        assert receipt.chosen is not None
        chosen.append(receipt.chosen.backend)
        took_s = prefill_s(chosen[-1], now)
        heappush(events, (now + took_s, 0, name))
        heappush(events, (now + took_s + 0.3, 1, name))
    return chosen


def test_a_server_that_becomes_fast_again_is_used_again() -> None:
    chosen = used(lambda name, now: 0.2 if name == "gpu1" and now < 120.0 else 0.05)
    assert chosen[:MINUTE].count("gpu1") < 5
    last = Counter(chosen[-MINUTE // 2 :])
    assert last["gpu1"] > 20


def test_a_server_that_stays_slow_costs_a_hundredth() -> None:
    chosen = used(lambda name, now: 0.2 if name == "gpu1" else 0.05)
    assert 8 <= chosen.count("gpu1") <= 2 * CHATS / 100
