"""Mode observe: every request is sent at once, and what would have been decided is counted."""

from collections import Counter

import pytest
from core_requests import document

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import BackendSpec, Bucket, Reject, Request, Send, Tenant
from forebay.proxy.core.policy.routing import Route, least_connections
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.telemetry.receipt_text import verdict

BUCKETS = [Bucket("chat", 5_000, 100, 2.0), Bucket("document", 131_072, 100, 30.0, 1)]


def observing(count: int = 2, tenants: tuple[Tenant, ...] = ()) -> tuple[Shaper, DecisionRecorder]:
    recorder = DecisionRecorder(1_000)
    specs = [BackendSpec(f"b{i}", 4) for i in range(count)]
    shaper = Shaper(specs, BUCKETS, recorder=recorder, tenants=tenants, observed=least_connections)
    for spec in specs:
        shaper.backend_up(spec.name, 0.0)
    return shaper, recorder


def test_whatever_comes_is_sent_at_once() -> None:
    """Beyond every slot, queue and deadline; in turn to the backend with the fewest requests."""
    shaper, _ = observing()
    sent = Counter[str]()
    for i in range(60):
        (action,) = shaper.arrive(document(str(i), first=1_000 * i), i / 100)
        assert isinstance(action, Send)
        assert action.queued_s == 0.0
        sent[action.backend] += 1
    assert set(sent.values()) == {30}
    assert not list(shaper.waiting())
    assert shaper.wake_at() == float("inf")


def test_what_would_have_been_decided_is_counted() -> None:
    shaper, recorder = observing()
    for i in range(40):
        shaper.arrive(document(str(i), first=1_000 * i), i / 100)
    counts = recorder.receipts.tally("document").observed
    assert sum(counts.values()) == 40
    assert counts["starts"] >= 2
    assert counts["max_wait"] > 20
    assert counts.keys() <= {"starts", "queues", "max_wait", "idle"}


def test_a_prompt_above_every_bucket_and_one_above_its_quota() -> None:
    shaper, recorder = observing(tenants=(Tenant("a", 1.0, 10.0, 1_000.0),))
    for request, rule in (
        (Request("long", 200_000), "prompt_too_long"),
        (Request("first", 900, tenant="a"), "starts"),
        (Request("second", 900, tenant="a"), "tenant_quota"),
    ):
        (action,) = shaper.arrive(request, 0.0)
        assert isinstance(action, Send)
        receipt = recorder.receipts.under_way[request.id]
        assert receipt.would is not None
        assert receipt.would.rule == rule


def test_the_record_tells_both() -> None:
    shaper, recorder = observing(1)
    for i in range(8):
        shaper.arrive(document(str(i), first=1_000 * i), 0.0)
    shaper.first_token("7", 40.0)
    receipt = recorder.receipts.under_way["7"]
    text = verdict(receipt, 41.0)
    assert text.startswith("Sent at once to b0. First token after 40.0 s")
    assert "In mode shape it would be rejected" in text
    tally = recorder.receipts.tally("document")
    assert tally.refusals == dict.fromkeys(tally.refusals, 0)


def test_after_a_failure_it_is_sent_to_another_at_once() -> None:
    shaper, _ = observing()
    (action,) = shaper.arrive(document("d"), 0.0)
    for i in range(20):
        shaper.arrive(document(str(i), first=1_000 * i), 0.0)
    (again,) = shaper.retry("d", 1.0)
    assert isinstance(action, Send)
    assert isinstance(again, Send)
    assert again.backend != action.backend
    (gone,) = shaper.retry("d", 2.0)
    assert isinstance(gone, Reject)
    assert gone.reason == "no_backend_available"


@pytest.mark.parametrize("observed", [least_connections, None])
def test_the_mode_changes_while_requests_run(observed: Route | None) -> None:
    """Waiting requests are sent by the rules; new ones are observed, or no longer."""
    shaper, _ = observing()
    options = {"route": least_connections, "affinity": shaper._dispatcher.affinity}
    shaper.changes.reconfigure(BUCKETS, 0.0, dispatch_ahead_s=0.3, **options)  # type: ignore[arg-type]
    for i in range(4):
        shaper.arrive(document(str(i), first=1_000 * i), 0.0)
    assert len(list(shaper.waiting())) == 2
    shaper.changes.reconfigure(
        BUCKETS,
        1.0,
        dispatch_ahead_s=0.3,
        observed=observed,
        **options,  # type: ignore[arg-type]
    )
    actions = shaper.arrive(document("late", first=9_000), 1.0)
    assert [isinstance(action, Send) for action in actions] == ([True] if observed else [])
    done = []
    for now in range(2, 8):
        for request_id in sorted(shaper._dispatcher.running):
            done += [request_id, *(a.request.id for a in shaper.finish(request_id, float(now)))]
    assert set(done) == {*map(str, range(4)), "late"}
    assert all(backend.idle for backend in shaper.backends.values())


def test_a_large_fleet_is_looked_at_whole() -> None:
    shaper, _ = observing(30)
    sent = Counter[str]()
    for i in range(90):
        (action,) = shaper.arrive(document(str(i), first=1_000 * (i % 5)), i / 100)
        assert isinstance(action, Send)
        sent[action.backend] += 1
    assert set(sent.values()) == {3}


def test_what_would_be_over_quota_is_neither_charged_nor_refunded() -> None:
    """The engine counts fewer tokens than a quota is charged for a guess."""
    shaper, recorder = observing(tenants=(Tenant("a", 1.0, 1.0, 1_000.0),))
    for i in range(8):
        request = Request(str(i), 400, tenant="a", quota_tokens=500)
        shaper.arrive(request, 0.0)
        shaper.first_token(str(i), 0.0)
        if i > 1:  # those that were admitted are still running
            shaper.used(str(i), 10, 0.0, 0, 400)
            shaper.finish(str(i), 0.0)
    counts = recorder.receipts.tally("chat").observed
    assert counts == {"starts": 2, "tenant_quota": 6}


def test_a_backend_that_is_full_or_on_trial_gets_no_more_than_else() -> None:
    """Such a backend has the fewest requests, as it rejects them at once."""
    shaper, _ = observing()
    shaper.backend_up("b0", 0.0, most_prefills=0)
    for i in range(5):
        (action,) = shaper.arrive(document(str(i), first=1_000 * i), i / 100)
        assert isinstance(action, Send)
        assert action.backend == "b1"
    shaper.backend_up("b0", 1.0)
    (action,) = shaper.arrive(document("later", first=9_000), 1.0)
    assert isinstance(action, Send)
    assert action.backend == "b0"
