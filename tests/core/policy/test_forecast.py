"""The predicted wait in a prefill queue and its margin, and which speeds are assumed."""

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush

import pytest
from core_requests import all_up, document
from fakes.api_servers import without_api_server

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.learn.cost import features
from forebay.proxy.core.learn.decay import RECENT_S
from forebay.proxy.core.model import BackendSpec, Bucket, Reject, Request
from forebay.proxy.core.policy.admission import SURE
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import QueuedRequest

CHAT = Bucket("chat", 5_000, max_queue=64, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_queue=64, max_wait_s=30.0)


def confirm(backend: Backend) -> None:
    """Let one prefill take what was predicted: before that there is no margin."""
    backend.cost.observe(features(100, 100), backend.cost.predict_s(100, 100))


def in_line(chats: int, *, document_at: float | None = None) -> tuple[Option, float]:
    """A chat's option behind so many that wait, and the usual share of its wait as a margin."""
    made = all_up(Shaper([BackendSpec("a", 64)], [CHAT, DOCUMENT]))
    (backend,) = made.backends.values()
    confirm(backend)
    backend.send(Request("running", 4_000), "chat", 0, now=0.0)
    backend.worked["chat"].amount = 0.0  # no later chats are expected to go first
    waiting = [("chat", 0.0, 0.1)] * chats
    if document_at is not None:
        waiting.append(("document", document_at, 0.1))
    for order, (bucket, at, work_s) in enumerate(waiting):
        deadline = at + made.buckets[bucket].max_wait_s
        one = QueuedRequest(Request(f"w{order}", 4_000), bucket, at, deadline, order, work_s)
        one.due = at  # before the newcomer
        backend.enqueue(one)
    newcomer = QueuedRequest(Request("new", 4_000), "chat", 0.0, 2.0, 1_000, 0.1)
    (option,) = made._state.forecast.options(newcomer, 0.0)
    return option, SURE * backend.cost.error.at(option.wait_s)


def test_errors_of_many_in_order_cancel_out() -> None:
    one, share = in_line(1)
    assert one.margin_s == pytest.approx(share * one.wait_s)
    many, share = in_line(16)
    alone_s = many.wait_s - 1.6  # of what runs: nothing to cancel with
    assert many.margin_s == pytest.approx(share * (alone_s + 1.6 / 4))


@pytest.mark.parametrize(("document_at", "cancel"), [(0.0, True), (-20.0, False)])
def test_but_not_where_another_bucket_comes_between(document_at: float, cancel: bool) -> None:
    """A document claims its turn once it has waited half of what it can."""
    option, share = in_line(16, document_at=document_at)
    assert (option.margin_s < 0.5 * share * option.wait_s) == cancel
    assert (option.margin_s >= share * option.wait_s) != cancel


def test_a_guess_has_no_margin() -> None:
    """Until its first answer a backend must not turn away whom it could serve."""
    made = all_up(Shaper([BackendSpec("a", 64)], [CHAT, DOCUMENT]))
    for number in range(8):
        actions = made.arrive(Request(f"{number}", 60_000, 1), 0.0)
        assert not any(isinstance(action, Reject) for action in actions)
    (backend,) = made.backends.values()
    newcomer = QueuedRequest(Request("new", 60_000, 1), "document", 0.0, 30.0, 1_000, 3.0)
    newcomer.due = 30.0  # behind all of them
    (option,) = made._state.forecast.options(newcomer, 0.0)
    assert option.wait_s > 20.0
    assert option.margin_s < 1.0
    confirm(backend)
    (option,) = made._state.forecast.options(newcomer, 0.0)
    assert option.margin_s > 4.0


def documents_in_line(*, chats_share: float = 0.0, kv_used: int = 0, cold: bool = True) -> Shaper:
    """A backend with 100,000 tokens of KV cache, for which 16 documents wait."""
    made = all_up(Shaper([BackendSpec("a", 64, 100_000.0)], [CHAT, DOCUMENT]))
    without_api_server(made)
    (backend,) = made.backends.values()
    confirm(backend)
    backend.send(Request("running", kv_used, 1), "document", 0, now=-1.0)
    backend.first_token("running", 0.0)
    backend.worked["document"].amount = 0.0  # no later documents are expected to go first
    backend.worked["chat"].add(chats_share * RECENT_S, 0.0)
    for order in range(16):
        one = QueuedRequest(Request(f"w{order}", 8_000, 1), "document", 0.0, 30.0, order, 0.1)
        one.due, one.kv_tokens = 0.0, 8_001.0 if cold else 0.0
        backend.enqueue(one)
    return made


def option_of_a_document(made: Shaper) -> Option:
    newcomer = QueuedRequest(Request("new", 8_000, 1), "document", 0.0, 30.0, 1_000, 0.1)
    (option,) = made._state.forecast.options(newcomer, 0.0)
    return option


@pytest.mark.parametrize(("chats_share", "cancel"), [(0.05, True), (0.2, False)])
def test_few_chats_leave_the_order_as_it_is(chats_share: float, cancel: bool) -> None:
    made = documents_in_line(chats_share=chats_share, kv_used=10, cold=False)
    option = option_of_a_document(made)
    share = SURE * made.backends["a"].cost.error.at(option.wait_s)
    assert (option.margin_s < 0.5 * share * option.wait_s) == cancel


def test_waiting_cache_hits_need_no_kv_cache() -> None:
    """Cold documents do. The answer that runs is taken to end at twice its age of a second."""
    alone = option_of_a_document(documents_in_line(kv_used=10, cold=False))
    hits = option_of_a_document(documents_in_line(kv_used=80_000, cold=False))
    assert hits.wait_s == pytest.approx(alone.wait_s)
    documents = documents_in_line(kv_used=80_000, cold=True)
    missing = 17 * 8_001 - (0.95 * 100_000 - 80_001)
    assert option_of_a_document(documents).wait_s == pytest.approx(2.0 * missing / 80_001, rel=0.1)


def test_a_waiting_request_with_a_computed_prefix_takes_little_kv_cache() -> None:
    made = all_up(Shaper([BackendSpec("a", 1)], [CHAT, DOCUMENT]))
    made.arrive(document("first", 20_000), 0.0)
    made.first_token("first", 1.0)
    made.arrive(document("second", 20_000), 1.0)
    made.arrive(document("another", 20_000, first=1_000), 1.0)
    cold = {w.request.id: w.kv_tokens > 20_000 for w in made.waiting()}
    assert cold == {"second": False, "another": True}


CHATS, EVERY_S, MINUTE = 1_200, 0.5, 120


def used(prefill_s: Callable[[str, float], float]) -> list[str]:
    """The backends of chats of ten minutes, if a prefill at a time takes so long there."""
    specs = [BackendSpec(name, 64) for name in ("gpu0", "gpu1")]
    shaper = all_up(Shaper(specs, [Bucket("chat", 5_000)], recorder=DecisionRecorder(CHATS)))

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
