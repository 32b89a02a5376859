"""Requests for a document that waits for its prefill follow its leader and share its fate."""

import pytest
from core_requests import all_up, document, sends

from forebay.proxy.core.model import INSTANT_S, Action, BackendSpec, Bucket, Reject, Request
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.queue import QueuedRequest

DOCUMENT = Bucket("document", 200_000, 100, 30.0, prefills_per_backend=1)


def asks(name: str, about: int, tokens: int = 60_000) -> Request:
    """A question about one of many documents, which have nothing in common."""
    return document(name, tokens, first=1_000 * about)


def busy(count: int = 2) -> Shaper:
    """Every engine computes a document, number 1 to `count`."""
    shaper = Shaper([BackendSpec(f"b{i}", 64) for i in range(1, count + 1)], [DOCUMENT])
    for i in range(1, count + 1):
        shaper.backend_up(f"b{i}", 0.0)
        first = shaper.arrive(asks(f"first {i}", i, 120_000), 0.0)
        assert sends(first) == [(f"first {i}", f"b{i}")]
    return shaper


def waiting(shaper: Shaper, name: str) -> QueuedRequest:
    (found,) = [w for w in shaper.waiting() if w.request.id == name]
    return found


def place(shaper: Shaper, name: str) -> str:
    return waiting(shaper, name).backend


def test_a_question_about_a_waiting_document_waits_where_the_document_does() -> None:
    shaper = busy()
    shaper.arrive(asks("leader", 5), 0.1)
    for i in range(5):
        shaper.arrive(asks(f"follower {i}", 5), 0.2)
    shaper.arrive(asks("other", 6), 0.3)
    home = place(shaper, "leader")
    assert {place(shaper, f"follower {i}") for i in range(5)} == {home}
    assert place(shaper, "other") != home
    backend = shaper.backends[home]
    assert backend.queued_s < 1.3 * backend.prefill_s(asks("leader", 5), 0)
    shaper.first_token(f"first {home[1]}", 8.0)
    assert "leader" in backend.prefills
    # The followers go one after the other, each when the text before it is nearly tokenized.
    now, hits = 12.0, sends(shaper.first_token("leader", 12.0))
    assert len(hits) == 1
    while len(hits) < 5:
        now = shaper.wake_at()
        hits += sends(shaper.wake(now))
    assert hits == [(f"follower {i}", home) for i in range(5)]
    before_s = backend.api_server.model.before_s(60_000)
    assert now == pytest.approx(12.0 + 4 * before_s - INSTANT_S)


def test_a_document_that_alone_is_asked_about_keeps_its_turn() -> None:
    shaper = busy(1)
    shaper.arrive(asks("earlier", 5), 0.1)
    shaper.arrive(asks("later", 6), 0.2)
    assert sends(shaper.first_token("first 1", 8.0)) == [("earlier", "b1")]


def test_the_next_leads_when_the_leader_leaves() -> None:
    """And is as long as the document again; who follows both is not asked to move."""
    shaper = busy(1)
    (backend,) = shaper.backends.values()
    shaper.arrive(asks("leader", 5), 0.1)
    shaper.arrive(asks("second", 5), 0.2)
    shaper.arrive(asks("third", 5), 0.3)
    assert [w.request.id for w in backend.leaders.by_id.values()] == ["leader"]
    shaper.cancel("leader", 0.4)
    shaper.first_token("first 1", 8.0)
    assert set(backend.prefills) == {"second"}
    third = waiting(shaper, "third")
    assert third.follows
    assert third.work_s < 0.1 * backend.prefill_s(third.request, 0)
    assert sends(shaper.first_token("second", 12.0)) == [("third", "b1")]


def test_followers_come_to_where_their_leader_was_computed() -> None:
    """The leader headed its queue, and the other engine had room first."""
    shaper = busy()
    shaper.arrive(asks("leader", 5), 0.1)
    home, away = ("b1", "b2") if place(shaper, "leader") == "b1" else ("b2", "b1")
    shaper.arrive(asks("follower", 5), 0.2)
    assert place(shaper, "follower") == home
    assert sends(shaper.first_token(f"first {away[1]}", 1.0)) == [("leader", away)]
    assert place(shaper, "follower") == home
    assert sends(shaper.first_token("leader", 4.0)) == [("follower", away)]


def test_a_follower_that_waits_elsewhere_comes_when_the_prefill_is_done() -> None:
    """The request could not have waited for this engine, which was done earlier than predicted."""
    hasty = Bucket("document", 200_000, 100, 5.0, prefills_per_backend=1)
    shaper = all_up(Shaper([BackendSpec("b1", 64), BackendSpec("b2", 64)], [hasty]))
    assert sends(shaper.arrive(asks("whole", 5, 120_000), 0.0)) == [("whole", "b1")]
    assert sends(shaper.arrive(asks("other", 6, 30_000), 0.0)) == [("other", "b2")]
    shaper.arrive(asks("beginning", 5, 40_000), 0.1)
    assert place(shaper, "beginning") == "b2"
    assert sends(shaper.first_token("whole", 0.5)) == [("beginning", "b1")]


@pytest.mark.parametrize("busy_too", [False, True])
def test_a_copy_is_begun_at_once_or_not_at_all(busy_too: bool) -> None:
    """Behind what b2 computes, a copy would end first, but it is not begun at once."""
    shaper = all_up(Shaper([BackendSpec("b1", 64), BackendSpec("b2", 64)], [DOCUMENT]))
    assert sends(shaper.arrive(asks("whole", 5, 120_000), 0.0)) == [("whole", "b1")]
    if busy_too:
        assert sends(shaper.arrive(asks("other", 6, 30_000), 0.1)) == [("other", "b2")]
    actions = shaper.arrive(asks("beginning", 5, 40_000), 0.2)
    assert sends(actions) == ([] if busy_too else [("beginning", "b2")])
    if busy_too:
        assert place(shaper, "beginning") == "b1"


def test_nobody_leads_with_a_short_prompt() -> None:
    shaper = busy(1)
    (backend,) = shaper.backends.values()
    shaper.arrive(asks("short", 5, 2_000), 0.1)
    shaper.arrive(asks("same", 5, 2_000), 0.2)
    assert not backend.leaders.by_id
    assert not backend.followers.by_id


def test_a_follower_is_refused_in_its_turn_when_its_leader_is() -> None:
    shaper = busy(1)
    shaper.arrive(asks("leader", 5), 0.1)
    shaper.arrive(asks("follower", 5), 0.2)
    actions: list[Action] = []
    for _ in range(10):
        if not shaper.waiting():
            break
        actions += shaper.wake(shaper.wake_at())
    assert {a.request.id for a in actions if isinstance(a, Reject)} == {"leader", "follower"}
