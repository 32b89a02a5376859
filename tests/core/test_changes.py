"""Backends come and go and buckets change while requests run and wait: no request is lost."""

from math import inf
from typing import Any

from core_requests import sends, sent_to
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from shaper_machine import ShaperMachine

from forebay.proxy.core.model import Action, BackendSpec, Bucket, Reject, Request, Send
from forebay.proxy.core.policy.routing import ROUTES, warm_or_least_work
from forebay.proxy.core.shaper import Shaper

BUCKETS = [Bucket("chat", 5_000, 9, 2.0), Bucket("document", 131_072, 9, 30.0, 1)]
PDF = tuple(range(60))


class ChangingMachine(ShaperMachine):
    """The same machine and its invariants, while an operator changes what there is."""

    chat_up_to = 5_000
    draining: set[str]
    added = 0

    def bucket(self, request: Request) -> str:
        return "chat" if request.prompt_tokens <= self.chat_up_to else "document"

    @precondition(lambda self: len(self.slots) < 12)
    @rule(slots=st.integers(1, 3), many=st.sampled_from([1, 9]))
    def add(self, slots: int, many: int) -> None:
        for _ in range(many):
            self.added += 1
            name = f"new{self.added}"
            self.slots[name] = slots
            self.apply(self.shaper.changes.add_backend(BackendSpec(name, slots), self.now))
            self.up.add(name)
            self.apply(self.shaper.backend_up(name, self.now))

    @precondition(lambda self: self.going() != set(self.slots))
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.slots) - self.going())))
        self.up.discard(name)
        self.apply(self.shaper.changes.drain_backend(name, self.now))
        self.apply(self.shaper.backend_up(name, self.now))  # a late probe does not revive it

    @precondition(lambda self: any(self.idle(name) for name in self.going()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        idle = [name for name in sorted(self.going()) if self.idle(name)]
        name = data.draw(st.sampled_from(idle))
        del self.slots[name]
        self.apply(self.shaper.changes.remove_backend(name, self.now))

    @precondition(lambda self: self.going())
    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.going())))
        self.slots[name] += 1
        self.restarted(name)
        self.apply(self.shaper.changes.add_backend(BackendSpec(name, self.slots[name]), self.now))

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), more=st.integers(0, 2))
    def resize(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.slots)))
        self.slots[name] += more
        spec = BackendSpec(name, self.slots[name], data.draw(st.sampled_from([inf, 150_000.0])))
        if more == 2:
            self.restarted(name)
        self.apply(self.shaper.changes.change_backend(spec, self.now, moved=more == 2))

    @precondition(lambda self: self.up != set(self.slots) - self.going())
    @rule(data=st.data())
    def backend_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.slots) - self.up - self.going())))
        self.up.add(name)
        self.apply(self.shaper.backend_up(name, self.now))

    @rule(
        chat_up_to=st.sampled_from([400, 5_000, 60_000]),
        more_queue=st.integers(0, 1),
        route=st.sampled_from(sorted(ROUTES)),
        ahead_s=st.sampled_from([0.1, 0.3]),
    )
    def reconfigure(self, chat_up_to: int, more_queue: int, route: str, ahead_s: float) -> None:
        self.chat_up_to = chat_up_to
        mates = [
            sum(self.bucket(r) == b for r in self.waiting.values()) for b in ("chat", "document")
        ]
        # Whoever waits keeps the place: the test's bounds must hold for them too.
        self.max_queue = max(self.max_queue + more_queue, *mates)
        self.prefills_per_backend = inf
        self.running = {
            id_: (request, backend, self.bucket(request))
            for id_, (request, backend, _) in self.running.items()
        }
        actions = self.shaper.changes.reconfigure(
            [
                Bucket("chat", chat_up_to, self.max_queue, max_wait_s=2.0),
                Bucket("document", 131_072, self.max_queue, 30.0),
            ],
            self.now,
            route=ROUTES[route],
            dispatch_ahead_s=ahead_s,
        )
        self.apply(actions)

    def going(self) -> set[str]:
        return {name for name, backend in self.shaper.backends.items() if backend.draining}


TestChanging = ChangingMachine.TestCase
TestChanging.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def shaper(*names: str, buckets: list[Bucket] = BUCKETS) -> Shaper:
    made = Shaper([BackendSpec(name, 2) for name in names], buckets)
    for name in names:
        assert not made.backend_up(name, 0.0)
    return made


def ask(made: Shaper, id_: str, tokens: int, now: float = 0.0, **more: Any) -> list[Action]:
    return made.arrive(Request(id_, tokens, 10, **more), now)


def test_a_drained_backend_keeps_its_streams_and_gives_its_queue_away() -> None:
    made = shaper("a", "b")
    (first,) = ask(made, "1", 100_000)
    assert isinstance(first, Send)
    (second,) = ask(made, "2", 100_000)
    assert isinstance(second, Send)
    assert ask(made, "3", 100_000) == []
    (waiting,) = made.waiting()
    other = {"a": "b", "b": "a"}[waiting.backend]
    assert made.changes.drain_backend(waiting.backend, 1.0) == []
    (waiting,) = made.waiting()
    assert waiting.backend == other
    gone = {"a": "b", "b": "a"}[other]
    assert not made.backends[gone].idle
    running = next(iter(made.backends[gone].in_flight))
    assert made.finish(running, 2.0) == []
    assert made.changes.remove_backend(gone, 2.0) == []
    assert list(made.backends) == [other]
    assert sends(made.finish({"1": "2", "2": "1"}[running], 3.0)) == [("3", other)]


def test_a_request_for_a_backend_that_no_other_replaces_is_rejected() -> None:
    made = shaper("a")
    assert [type(a) for a in ask(made, "1", 100_000)] == [Send]
    assert ask(made, "2", 100_000) == []
    (refused,) = made.changes.drain_backend("a", 1.0)
    assert isinstance(refused, Reject)
    assert (refused.request.id, refused.reason) == ("2", "no_backend_available")


def test_requests_follow_their_length_into_other_buckets() -> None:
    made = shaper("a")
    ask(made, "runs", 100_000)
    ask(made, "waits", 90_000)
    ask(made, "huge", 120_000)
    deadlines = {w.request.id: w.deadline for w in made.waiting()}
    buckets = [Bucket("short", 50_000, 1), Bucket("long", 95_000, 1, 10.0)]
    (refused,) = made.changes.reconfigure(buckets, 1.0)
    assert isinstance(refused, Reject)
    assert (refused.request.id, refused.reason) == ("huge", "prompt_too_long")
    (waiting,) = made.waiting()
    assert waiting.bucket == "long"
    assert waiting.deadline == deadlines["waits"]
    assert made.backends["a"].prefill_queue.prefills_of == {"short": 0, "long": 1}
    assert made.queued("long") == 1
    (sent,) = made.finish("runs", 2.0)
    assert isinstance(sent, Send)
    assert sent.bucket == "long"
    assert made.backends["a"].prefill_queue.prefills_of == {"short": 0, "long": 1}
    made.finish("waits", 3.0)
    assert made.backends["a"].idle
    assert made.wake_at() == inf


def test_waiting_requests_are_sent_once_the_proxy_only_observes() -> None:
    made = shaper("a")
    for i in range(4):
        ask(made, str(i), 500)
    assert made.queued("chat") == 2
    actions = made.changes.reconfigure(BUCKETS, 1.0, observed=warm_or_least_work)
    assert [type(action) for action in actions] == [Send] * 2
    assert not made.queued("chat")


def test_a_retry_after_a_change_counts_for_the_new_bucket() -> None:
    made = shaper("a", "b")
    (sent,) = ask(made, "1", 100_000)
    assert isinstance(sent, Send)
    assert made.changes.reconfigure([Bucket("all", 200_000)], 1.0) == []
    (again,) = made.retry("1", 1.0)
    assert isinstance(again, Send)
    assert again.backend != sent.backend
    assert again.bucket == "all"


def test_cached_prefixes_are_remembered_when_the_fleet_grows_and_shrinks() -> None:
    """Beyond eight backends those that hold a prefix are found by an index over all of them."""
    made = shaper(*"abcdefgh")
    (holder,) = sent_to(ask(made, "1", 120_000, blocks=PDF, block_tokens=2000.0))
    made.first_token("1", 5.0)
    made.finish("1", 6.0)
    for name in "ijk":
        made.changes.add_backend(BackendSpec(name, 2), 7.0)
        made.backend_up(name, 7.0)
    (sent,) = ask(made, "2", 120_000, 8.0, blocks=PDF, block_tokens=2000.0)
    assert isinstance(sent, Send)
    assert (sent.backend, sent.matched_tokens) == (holder, 119_999)
    made.finish("2", 9.0)
    for name in [name for name in "abcdefghijk" if name != holder][:5]:
        made.changes.drain_backend(name, 10.0)
        made.changes.remove_backend(name, 10.0)
    assert [backend.index for backend in made.backends.values()] == list(range(6))
    assert sent_to(ask(made, "3", 120_000, 11.0, blocks=PDF, block_tokens=2000.0)) == [holder]


def test_a_backend_that_is_taken_back_while_it_drains_is_another_server() -> None:
    """Operators take a server out to restart it, or give its name to another URL."""
    made = shaper("a")
    ask(made, "1", 120_000, blocks=PDF, block_tokens=2000.0)
    made.first_token("1", 5.0)
    made.changes.drain_backend("a", 6.0)
    made.changes.add_backend(BackendSpec("a", 2), 7.0)
    made.backend_up("a", 7.0)
    (sent,) = ask(made, "2", 120_000, 8.0, blocks=PDF, block_tokens=2000.0)
    assert isinstance(sent, Send)
    assert sent.matched_tokens == 0


@given(st.integers(9, 14), st.integers(0, 8))
def test_the_index_over_a_fleet_holds_what_each_backend_holds(size: int, gone: int) -> None:
    made = shaper(*(f"b{i}" for i in range(size)))
    for i in range(30):
        ask(made, str(i), 4_000, blocks=tuple(range(i % 7 * 100, i % 7 * 100 + 9)))
    for id_ in [id_ for b in made.backends.values() for id_ in b.in_flight]:
        made.finish(id_, 1.0)
    for name in [name for name, b in made.backends.items() if b.idle][:gone]:
        made.changes.drain_backend(name, 2.0)
        made.changes.remove_backend(name, 2.0)
    candidates = made._state.forecast._shortlist
    expected: dict[int, int] = {}
    if not candidates.all:
        for backend in made.backends.values():
            for document in range(7):
                for position in (1, 2, 4, 8):
                    block = document * 100 + position - 1
                    if block in backend.cache.prefixes._held:
                        expected[block] = expected.get(block, 0) | 1 << backend.index
    assert candidates._holders == expected
