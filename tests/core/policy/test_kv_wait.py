"""The wait for KV cache: what counts, and when a prefix is not copied."""

import pytest

from forebay.proxy.core.model import BackendSpec, Bucket, Reject, Request, Send
from forebay.proxy.core.policy.kv_wait import kv_need, kv_use, kv_wait_s, without_copies
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.queue import QueuedRequest

BUCKETS = (
    Bucket("chat", 5_000, max_wait_s=30.0, target_s=2.0),
    Bucket("document", 131_072, max_wait_s=30.0, target_s=15.0),
)
HEAD = tuple(range(12))  # 12 blocks of 512 tokens that prompts of one group share


def question(name: str, own: int, answer: int = 1_000) -> Request:
    """Return a prompt of 7,168 tokens that shares its first 6,144 with its group."""
    return Request(name, 7_168, answer, (*HEAD, own, own + 1))


def running(count: int, kv_tokens: float) -> Shaper:
    """Return one backend on which `count` questions of one group decode since 0.1 s."""
    shaper = Shaper([BackendSpec("a", 256)], BUCKETS)
    shaper.backend_up("a", 0.0, kv_tokens=kv_tokens)
    (backend,) = shaper.backends.values()
    for number in range(count):
        request = question(f"r{number}", 100 + 2 * number)
        backend.send(request, "document", backend.matched_tokens(request), 0.0)
        backend.first_token(request.id, 0.1)
    return shaper


def waits(request: Request, number: int = 99) -> QueuedRequest:
    return QueuedRequest(request, "document", 1.0, 16.0, number)


class TestWhatCounts:
    def test_a_shared_prefix_counts_once(self) -> None:
        (backend,) = running(3, 40_000.0).backends.values()
        need = kv_need(backend, waits(question("x", 900)))
        assert need == pytest.approx(1_024 + 1_000 * backend.kv.answer_share, abs=1)

    def test_a_leader_leaves_its_followers_the_rest(self) -> None:
        (backend,) = running(0, 40_000.0).backends.values()
        cold, led = waits(question("x", 900)), waits(question("y", 902))
        assert kv_need(backend, cold) - kv_need(backend, led, led_tokens=6_144) == 6_144

    def test_waiting_requests_take_theirs_first(self) -> None:
        (backend,) = running(20, 44_000.0).backends.values()
        alone_s, _ = kv_wait_s(backend, waits(question("x", 900)), 0.0, 10.0)
        behind_s, spread_s = kv_wait_s(backend, waits(question("x", 900)), 20_000.0, 10.0)
        assert behind_s > alone_s + 5.0
        assert 0.0 < spread_s < behind_s

    def test_until_answers_end_the_running_ones_are_halfway(self) -> None:
        """After 10 s, twenty answers are taken to end within 20 s, not within one second."""
        (backend,) = running(20, 40_000.0).backends.values()
        wait_s, _ = kv_wait_s(backend, waits(question("x", 900)), 0.0, 10.0)
        assert wait_s == pytest.approx(10.1)

    def test_young_answers_end_together(self) -> None:
        """Evenly spread, the first of twenty answers of 40 s would end after 2 s."""
        (backend,) = running(20, 40_000.0).backends.values()
        for _ in range(40):
            backend.decode_all_s.add(40.0)
        early_s, _ = kv_wait_s(backend, waits(question("x", 900)), 0.0, 5.0)
        later_s, _ = kv_wait_s(backend, waits(question("x", 900)), 0.0, 30.0)
        assert early_s == pytest.approx(35.1, abs=2.0)
        assert later_s == pytest.approx(10.1, abs=2.0)

    def test_a_prefix_comes_free_with_its_last_request(self) -> None:
        (backend,) = running(20, 44_000.0).backends.values()
        backend.finished("r0", 30.0)
        assert backend.kv.freed.value <= 2_100 / 2  # its own part, averaged with the first guess
        assert kv_use(backend, question("x", 900))[0] > 0.5

    def test_an_empty_backend_and_an_unknown_size_make_no_wait(self) -> None:
        (backend,) = running(0, 40_000.0).backends.values()
        assert kv_wait_s(backend, waits(question("x", 900)), 0.0, 1.0) == (0.0, 0.0)
        (unknown,) = running(20, float("inf")).backends.values()
        assert kv_wait_s(unknown, waits(question("x", 900)), 1e9, 10.0) == (0.0, 0.0)


def option(name: str, used: float, tokens: float) -> Option:
    return Option(name, 0.0, 0.0, 0.1, 0.1, 0, 0.0, kv_used=used, kv_tokens=tokens)


class TestCopies:
    def test_none_is_made_once_every_pool_is_half_used(self) -> None:
        warm, cold = option("warm", 0.9, 1_024), option("cold", 0.6, 7_168)
        assert without_copies([warm, cold]) == [warm]

    def test_a_pool_with_room_takes_a_copy(self) -> None:
        warm, cold = option("warm", 0.9, 1_024), option("cold", 0.4, 7_168)
        assert without_copies([warm, cold]) == [warm, cold]

    def test_the_next_turn_of_a_session_may_go_anywhere(self) -> None:
        """Its last turn has ended, so no running request holds its prefix."""
        first, other = option("a", 0.9, 60_000), option("b", 0.9, 60_000)
        assert without_copies([first, other]) == [first, other]


def test_rejections_for_want_of_kv_cache_come_at_once() -> None:
    """Answers take 40 s and the pool holds 20: the queue never fills beyond what is served."""
    shaper = Shaper([BackendSpec("a", 256)], BUCKETS)
    shaper.backend_up("a", 0.0, kv_tokens=48_000.0)
    ends: list[tuple[float, str]] = []
    at_once = late = 0
    backend: Backend = shaper.backends["a"]
    for tick in range(4_000):
        now = 0.1 * tick
        actions = list(shaper.wake(now)) if shaper.wake_at() <= now else []
        late += sum(isinstance(action, Reject) for action in actions)
        while ends and ends[0][0] <= now:
            actions += shaper.finish(ends.pop(0)[1], now)
        new = shaper.arrive(question(f"q{tick}", 1_000 + 2 * tick), now) if tick % 10 == 0 else []
        at_once += sum(isinstance(action, Reject) for action in new)
        for action in [*actions, *new]:
            if isinstance(action, Send):
                shaper.first_token(action.request.id, now)
                ends.append((now + 40.0, action.request.id))
    assert at_once > 100
    assert late <= 0.05 * at_once
    assert backend.queued < 20
