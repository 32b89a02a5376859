"""Followers of a document whose prefill runs: when they start, and where."""

from core_requests import all_up, document, sent_ids

from forebay.proxy.core.model import BackendSpec, Bucket, Send
from forebay.proxy.core.policy.coalesce import must_follow
from forebay.proxy.core.shaper import Shaper

DOCUMENT = Bucket("document", 200_000, 100, 30.0, prefills_per_backend=1)


def one_engine() -> Shaper:
    """An engine that prefills a document; a follower and a shorter document wait."""
    shaper = all_up(Shaper([BackendSpec("b", 64)], [DOCUMENT]))
    assert sent_ids(shaper.arrive(document("leader", 100_000), 0.0)) == ["leader"]
    assert sent_ids(shaper.arrive(document("follower", 100_000), 0.1)) == []
    assert sent_ids(shaper.arrive(document("shorter", 40_000, first=5_000), 0.2)) == []
    return shaper


def test_a_follower_is_a_hit_once_its_document_is_computed() -> None:
    """The follower does not wait for the shorter document, whose prefill is due earlier.

    The shorter document waits only for the API server to tokenize the follower's text.
    """
    shaper = one_engine()
    assert sent_ids(shaper.first_token("leader", 7.0)) == ["follower"]
    at = shaper.wake_at()
    assert 7.0 < at < 7.5
    assert sent_ids(shaper.wake(at)) == ["shorter"]


def test_a_follower_is_as_long_as_its_document_if_that_is_not_computed() -> None:
    shaper = one_engine()
    (backend,) = shaper.backends.values()
    assert sent_ids(shaper.finish("leader", 0.3)) == ["shorter"]
    assert not backend.followers.by_id
    (follower,) = shaper.waiting()
    assert follower.work_s > 0.9 * backend.prefill_s(follower.request, 0)
    assert sent_ids(shaper.first_token("shorter", 3.0)) == ["follower"]


def test_a_follower_of_a_follower() -> None:
    """One that left the engine without an answer is followed by the next, and the rest wait."""
    shaper = one_engine()
    shaper.arrive(document("third", 100_000), 0.3)
    shaper.finish("leader", 0.4)
    assert sent_ids(shaper.first_token("shorter", 3.0)) == ["follower"]
    assert [w.request.id for w in shaper.waiting()] == ["third"]
    assert sent_ids(shaper.first_token("follower", 9.0)) == ["third"]


def test_a_request_that_reads_no_cache_follows_nobody_and_leads() -> None:
    """Its prefill computes the whole prompt, and puts it into the cache."""
    shaper = all_up(
        Shaper([BackendSpec("b", 64, chunk_tokens=2048)], [Bucket("all", 200_000, 100, 30.0)])
    )
    (backend,) = shaper.backends.values()
    scoring = document("scoring", 10_000, reads_cache=False)
    shaper.arrive(document("leader", 10_000), 0.0)
    assert not must_follow(backend, scoring)
    assert must_follow(backend, document("follower", 10_000))
    shaper.first_token("leader", 1.0)
    shaper.finish("leader", 1.1)
    (send,) = shaper.arrive(scoring, 2.0)
    assert isinstance(send, Send)
    assert send.matched_tokens == 0
    assert must_follow(backend, document("follower", 10_000))
