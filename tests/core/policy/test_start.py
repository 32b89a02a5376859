"""No request waits in vain, and one that leaves a queue lets the next one start."""

from math import inf

import pytest
from core_requests import all_up

from forebay.proxy.core.model import Action, BackendSpec, Bucket, Reject, Request, Send, Tenant
from forebay.proxy.core.policy.admission import Admit, refuse
from forebay.proxy.core.policy.start import kv_room
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.queue import QueuedRequest

CHAT = Bucket("chat", 5_000, max_queue=64, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_queue=64, max_wait_s=30.0, prefills_per_backend=1)
KV = 10_000.0


def shaper(
    *names: str,
    kv_tokens: float = inf,
    slots: int = 64,
    buckets: tuple[Bucket, ...] = (CHAT, DOCUMENT),
    tenants: tuple[Tenant, ...] = (),
    admit: Admit = refuse,
) -> Shaper:
    specs = [BackendSpec(name, slots, kv_tokens) for name in names]
    return all_up(Shaper(specs, buckets, tenants=tenants, admit=admit))


def sent(actions: list[Action]) -> dict[str, str]:
    return {action.request.id: action.backend for action in actions if isinstance(action, Send)}


def refused(actions: list[Action]) -> dict[str, str]:
    return {action.request.id: action.reason for action in actions if isinstance(action, Reject)}


def decoding(made: Shaper, request: Request, now: float) -> None:
    """Start the request and report its first token."""
    assert sent(made.arrive(request, now))
    made.first_token(request.id, now + 0.1)


class TestKvCache:
    """Requests that need many KV blocks, while small ones take every block that comes free."""

    def full(self) -> Shaper:
        """Three chats occupy nine tenths; a document that needs six tenths waits since 1.0 s."""
        patient = Bucket("chat", 5_000, max_queue=64, max_wait_s=20.0)
        made = shaper("a", kv_tokens=KV, buckets=(patient, DOCUMENT), admit=lambda *_: None)
        for name in ("x", "y", "z"):
            decoding(made, Request(name, 1_000, 2_000), 0.0)
        assert made.arrive(Request("long", 5_500, 500), 1.0) == []
        return made

    def test_small_requests_pass_at_first(self) -> None:
        made = self.full()
        made.finish("x", 5.0)
        assert sent(made.arrive(Request("small", 1_000, 2_000), 5.1)) == {"small": "a"}

    def test_after_half_of_its_patience_room_is_kept(self) -> None:
        made = self.full()
        assert made.finish("x", 20.0) == []
        assert made.backends["a"].starving is not None
        assert made.arrive(Request("later", 1_000, 2_000), 20.1) == []
        assert sent(made.finish("y", 25.8)) == {"long": "a"}
        assert made.backends["a"].starving is None

    def test_once_it_has_gone_the_others_go_on(self) -> None:
        made = self.full()
        made.finish("x", 20.0)
        assert made.arrive(Request("small", 1_000, 2_000), 30.0) == []
        actions = made.cancel("long", 30.5)
        assert sent(actions) == {"small": "a"}

    def test_no_more_is_kept_than_there_is(self) -> None:
        made = shaper("a", kv_tokens=KV)
        decoding(made, Request("x", 1_000, 1_000), 0.0)
        assert made.arrive(Request("more than all", 12_000, 500), 1.0) == []
        made.wake(20.0)
        small = QueuedRequest(Request("small", 10, 10), "chat", 29.0, 31.0, 99)
        assert kv_room(made.backends["a"], small) == -2_000


def test_whose_deadline_is_over_makes_room_for_the_next() -> None:
    made = shaper("a", kv_tokens=KV, buckets=(Bucket("all", 131_072, 64, 30.0),))
    decoding(made, Request("runs", 4_000, 3_000), 0.0)
    assert made.arrive(Request("head", 3_000, 1_000, timeout_s=5.0), 1.0) == []
    assert made.arrive(Request("next", 100, 50), 3.0) == []
    at = made.wake_at()
    actions = made.wake(at)
    assert refused(actions) == {"head": "deadline_unattainable"}
    assert sent(actions) == {"next": "a"}


class TestTheLastClearEngine:
    """A document waits for it while chats come in, but not until the other engine is through."""

    def occupied(self) -> tuple[Shaper, float]:
        """One document in prefill, another waits; and when the first will be through."""
        made = shaper("a", "b")
        for name in ("chat before", "chat"):
            made.arrive(Request(name, 500, 8), 0.0)
        made.finish("chat before", 0.05)
        assert sent(made.arrive(Request("first", 100_000, 8), 0.1))
        assert sent(made.arrive(Request("second", 100_000, 8), 0.2)) == {}
        queues = [backend.prefill_queue for backend in made.backends.values()]
        done_at = max(queue.head_since + queue.total_s for queue in queues)
        assert done_at > 2.0  # longer than a chat's patience
        return made, done_at

    def test_a_document_starts_when_the_other_should_end(self) -> None:
        made, done_at = self.occupied()
        made.finish("chat", 0.5)
        assert sent(made.wake(done_at - 0.01)) == {}
        assert made.wake_at() == pytest.approx(done_at)
        assert list(sent(made.wake(made.wake_at()))) == ["second"]

    def test_an_engine_that_has_no_other_beside_it_is_not_kept_clear(self) -> None:
        """However many chats come in: the document is sent whole, and at once."""
        made = shaper("a")
        for number in range(10):
            made.arrive(Request(f"chat {number}", 500, 8), number / 10)
            made.first_token(f"chat {number}", number / 10 + 0.05)
        assert sent(made.arrive(Request("document", 100_000, 8), 1.0)) == {"document": "a"}
        (prefill,) = made.backends["a"].prefills.values()
        assert prefill.request.prompt_tokens == 100_000

    def test_not_beside_one_that_is_late(self) -> None:
        """The prediction has proved wrong: the prefill may go on for long."""
        made, done_at = self.occupied()
        made.finish("chat", 0.5)
        (busy,) = (b for b in made.backends.values() if b.prefills)
        assert busy.prefill_queue.ends_at(done_at) == done_at
        assert busy.prefill_queue.ends_at(done_at + 0.1) == inf


class TestTrials:
    @pytest.mark.parametrize("streams", [True, False])
    def test_a_trial_is_one_request_whether_its_first_token_is_seen_or_not(
        self, streams: bool
    ) -> None:
        made = shaper("a", "b")
        made.backend_up("a", 0.0, most_prefills=1)
        there = 0
        for number in range(100):
            now = number / 10
            made.wake(now)
            for name, backend in sent(
                made.arrive(Request(f"{number}", 200, 50, streams=streams), now)
            ).items():
                there += backend == "a"
                if backend == "b":
                    made.first_token(name, now + 0.05)
                    made.finish(name, now + 0.06)
        assert there == 1
        made.backend_up("a", 10.0, most_prefills=inf)
        assert made.backends["a"].takes_another

    def test_a_request_at_a_backend_in_a_pause_goes_where_there_is_room(self) -> None:
        blocks = tuple(range(10))
        made = shaper("a", "b")
        first = sent(made.arrive(Request("warm", 5_000, 10, blocks, 500.0), 0.0))["warm"]
        made.first_token("warm", 0.15)
        made.finish("warm", 0.3)
        where = sent(made.arrive(Request("p", 20_000, 10), 1.0))
        where |= sent(made.arrive(Request("q", 20_000, 10), 1.0))
        assert set(where.values()) == {"a", "b"}
        assert made.arrive(Request("x", 5_000, 10, blocks, 500.0), 1.1) == []
        assert made._state.queues.waiting["x"].backend == first
        made.backend_up(first, 1.2, most_prefills=0)
        other = next(name for name, backend in where.items() if backend != first)
        assert sent(made.first_token(other, 1.7)) == {"x": {"a": "b", "b": "a"}[first]}

    def test_of_a_large_fleet_those_in_a_pause_are_not_looked_at_first(self) -> None:
        made = shaper(*(f"g{number}" for number in range(12)))
        for name in ("g3", "g7"):
            made.backend_up(name, 0.0, most_prefills=0)
        for number in range(40):
            decoding(made, Request(f"{number}", 1_000, 10), float(number))
            made.finish(f"{number}", number + 0.5)
        idle = {name for name, backend in made.backends.items() if not backend.sent_prompt_tokens}
        assert idle == {"g3", "g7"}


class TestLargeFleets:
    """More backends than are looked at for each request."""

    def test_backends_without_a_free_slot_are_not_looked_at_first(self) -> None:
        made = shaper(*(f"g{number}" for number in range(12)), slots=1)
        for number in range(12):
            decoding(made, Request(f"{number}", 5_000 if number < 8 else 10, 100), 0.0)
        for number in range(8):
            made.finish(f"{number}", 0.2)
        # Those that were sent least are full.
        assert sent(made.arrive(Request("x", 10, 100), 0.3))

    def test_an_idle_one_refuses_nobody_although_others_are_free_as_well(self) -> None:
        made = shaper(*(f"g{number}" for number in range(12)))
        for number in range(3):  # lightly loaded, and not idle
            decoding(made, Request(f"{number}", 10, 100), 0.0)
        for number in range(9):
            decoding(made, Request(f"long {number}", 100_000, 100), 0.0)
            made.finish(f"long {number}", 0.2)
        # Its own prefill is predicted to take longer than its client waits.
        (action,) = made.arrive(Request("x", 5_000, 10, timeout_s=0.05), 0.3)
        assert isinstance(action, Send)
        assert made.backends[action.backend].running == 1


class TestQuotaOfThoseWhoWereNotServed:
    def test_the_quota_is_given_back(self) -> None:
        tenants = (Tenant("t", tokens_per_s=10.0, burst_tokens=8_000.0),)
        made = shaper("a", kv_tokens=KV, tenants=tenants, admit=lambda *_: None)
        decoding(made, Request("runs", 4_000, 3_000), 0.0)
        for name, timeout_s in (("leaves", inf), ("too late", 5.0)):
            assert (
                made.arrive(Request(name, 3_000, 1_000, timeout_s=timeout_s, tenant="t"), 1.0) == []
            )
        made.cancel("leaves", 2.0)
        assert refused(made.wake(made.wake_at()))
        assert not refused(made.arrive(Request("again", 7_900, 10, tenant="t"), 6.0))

    def test_tokens_beyond_the_estimate_count_too(self) -> None:
        tenants = (Tenant("t", tokens_per_s=10.0, burst_tokens=8_000.0),)
        made = shaper("a", tenants=tenants)
        for name, tokens, counted in (("guessed low", 1_000, 3_000), ("high", 4_000, 1_000)):
            assert sent(made.arrive(Request(name, tokens, 10, tenant="t"), 0.0))
            made.used(name, 5, 0.1, None, counted)
            made.finish(name, 0.1)
        assert refused(made.arrive(Request("x", 1_100, 10, tenant="t"), 0.1))
        assert sent(made.arrive(Request("y", 900, 10, tenant="t"), 0.1))
        made.used("y", 5, 0.2, None, 1 << 60)
        (action,) = made.arrive(Request("z", 1, tenant="t"), 0.2)
        assert isinstance(action, Reject)
        assert 1.0 <= action.retry_after_s <= 60.0

    def test_of_those_who_were_sent_it_is_not(self) -> None:
        tenants = (Tenant("t", tokens_per_s=10.0, burst_tokens=8_000.0),)
        made = shaper("a", tenants=tenants)
        assert sent(made.arrive(Request("a", 5_000, 10, tenant="t"), 0.0))
        made.finish("a", 0.1)
        assert refused(made.arrive(Request("b", 5_000, 10, tenant="t"), 0.2)) == {
            "b": "tenant_quota"
        }


def test_a_rejected_request_is_told_when_what_is_in_front_of_it_is_done() -> None:
    """Not when the queue has room for it: new requests would take that first."""
    made = shaper("a")
    for number in range(9):
        assert not refused(made.arrive(Request(str(number), 60_000, 10), 0.0))
    (action,) = made.arrive(Request("x", 60_000, 10), 0.0)
    assert isinstance(action, Reject)
    backend = made.backends["a"]
    work_s = backend.prefill_queue.backlog_s(0.0) + backend.queued_s
    assert work_s > 20.0
    assert work_s <= action.retry_after_s <= work_s + 2.0


def test_waiting_without_a_limit_is_refused_like_any_other() -> None:
    made = shaper("a", "b", slots=1, buckets=(Bucket("all", 131_072, 64, inf),))
    made.backend_down("b", 0.0)
    for number in range(3):
        made.arrive(Request(f"{number}", 10, 1), 0.0)
    actions = made.backend_down("a", 1.0)
    assert set(refused(actions).values()) == {"no_backend_available"}
    assert len(actions) == 2


def test_a_retry_behind_a_full_queue_is_rejected() -> None:
    """It could start by itself, but a batch that needs two slots stands before it."""
    tight = Bucket("chat", 5_000, max_queue=1, max_wait_s=20.0)
    made = shaper("a", "b", slots=2, buckets=(tight, DOCUMENT))
    for name in ("x", "y"):
        decoding(made, Request(name, 1_000, 50), 0.0)
    assert made.arrive(Request("batch", 1_000, 50, sequences=2), 1.0) == []
    (waiting,) = made.waiting()
    ((_, failing),) = sent(made.arrive(Request("chat", 1_000, 50), 1.1)).items()
    assert failing != waiting.backend
    assert refused(made.retry("chat", 1.2)) == {"chat": "queue_full"}
    assert [left.request.id for left in made.waiting()] == ["batch"]


@pytest.mark.parametrize(("document_tokens", "chats"), [(0, 10), (8_192, 10), (8_193, 24)])
def test_a_chunking_engine_gets_more_chats_beside_what_exceeds_a_step(
    document_tokens: int, chats: int
) -> None:
    """A backlog of 0.3 s is ten chats. Without the fixed costs of steps it is 24."""
    made = all_up(Shaper([BackendSpec("a", 64, chunk_tokens=2_048)], (CHAT, DOCUMENT)))
    if document_tokens:
        assert sent(made.arrive(Request("document", document_tokens, 1), 0.0))
    starts = [bool(sent(made.arrive(Request(f"{n}", 500, 1), 0.0))) for n in range(40)]
    assert sum(starts) == chats
