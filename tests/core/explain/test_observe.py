"""Mode observe: every request is sent at once, and a forecast says what mode shape would do."""

from collections import Counter

import pytest
from core_requests import document, sent_to

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import BackendSpec, Bucket, Reject, Request, Send, Tenant
from forebay.proxy.core.observe import ObservingShaper
from forebay.proxy.core.policy.routing import Route, least_connections
from forebay.proxy.diagnose.receipt_text import verdict

BUCKETS = [Bucket("chat", 5_000, 100, 2.0), Bucket("document", 131_072, 100, 30.0, 1)]


def observing(
    count: int = 2, tenants: tuple[Tenant, ...] = ()
) -> tuple[ObservingShaper, DecisionRecorder]:
    recorder = DecisionRecorder(1_000)
    specs = [BackendSpec(f"b{i}", 4) for i in range(count)]
    shaper = ObservingShaper(
        specs, BUCKETS, recorder=recorder, tenants=tenants, observed=least_connections
    )
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


def test_the_decisions_of_mode_shape_are_counted() -> None:
    """A request that would wait is counted when it would be sent."""
    shaper, recorder = observing()
    for i in range(40):
        shaper.arrive(document(str(i), first=1_000 * i), i / 100)
    counts = recorder.receipts.tally("document").observed
    assert "queues" not in counts
    waiting = 40 - sum(counts.values())
    shaper.settle(60.0)
    assert counts["queues"] == waiting > 0
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
    shaper.changes.reconfigure(BUCKETS, 0.0, route=least_connections)
    for i in range(4):
        shaper.arrive(document(str(i), first=1_000 * i), 0.0)
    assert len(list(shaper.waiting())) == 2
    shaper.changes.reconfigure(BUCKETS, 1.0, route=least_connections, observed=observed)
    actions = shaper.arrive(document("late", first=9_000), 1.0)
    assert [isinstance(action, Send) for action in actions] == ([True] if observed else [])
    done = []
    for now in range(2, 8):
        for request_id in sorted(shaper._state.running):
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


def test_a_request_over_quota_is_neither_charged_nor_refunded() -> None:
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
        assert sent_to(shaper.arrive(document(str(i), first=1_000 * i), i / 100)) == ["b1"]
    shaper.backend_up("b0", 1.0)
    assert sent_to(shaper.arrive(document("later", first=9_000), 1.0)) == ["b0"]


def test_rejections_make_room_in_the_forecast() -> None:
    """The traffic fills the engines for minutes; mode shape would reject some, and serve others."""
    shaper, recorder = observing(1)
    for i in range(100):
        shaper.arrive(document(str(i), first=1_000 * i), 5.0 * i)
    shaper.settle(600.0)
    counts = recorder.receipts.tally("document").observed
    assert 40 < counts["max_wait"] < 60  # a document takes about 10 s
    receipts = [recorder.receipts.under_way[str(i)].would for i in range(100)]
    waits = [r.first_token_at - r.arrived_at for r in receipts if r and r.first_token_at > 0.0]
    assert max(waits) < 45.0


def test_the_speed_of_the_servers_is_learned_from_the_traffic() -> None:
    """Ten times slower than the prior: of documents that the prior serves, most are rejected."""
    shaper, recorder = observing(1)
    for i in range(30):
        at = 100.0 * i
        shaper.arrive(document(f"slow {i}", first=1_000 * i), at)
        shaper.first_token(f"slow {i}", at + 60.0)
        shaper.finish(f"slow {i}", at + 61.0)
    counts = recorder.receipts.tally("document").observed
    assert counts.get("max_wait", 0) == 0
    for i in range(10):
        shaper.arrive(document(str(i), first=50_000 + 1_000 * i), 3_000.0 + i)
    assert counts["max_wait"] >= 8


def test_a_client_that_leaves_leaves_the_forecast() -> None:
    shaper, recorder = observing(1)
    for i in range(3):
        shaper.arrive(document(str(i), first=1_000 * i), 0.0)
    for i in reversed(range(3)):
        shaper.finish(str(i), 0.1)
    would = [recorder.receipts.ended[str(i)].would for i in range(3)]
    assert [receipt.state for receipt in would if receipt] == ["ended", "left", "left"]


def test_a_backend_that_fails_takes_nothing_in_the_forecast() -> None:
    shaper, recorder = observing()
    for i in range(3):
        shaper.arrive(document(str(i), first=1_000 * i), 0.0)
    shaper.backend_down("b0", 0.1)
    shaper.settle(100.0)
    for i in range(3):
        would = recorder.receipts.under_way[str(i)].would
        assert would is not None
        assert would.backend == "b1"
        assert would.state == "ended"
    shaper.backend_up("b0", 100.0)
    shaper.arrive(document("later", first=9_000), 100.0)
    would = recorder.receipts.under_way["later"].would
    assert would is not None
    assert would.backend


def test_new_rules_begin_the_forecast_anew() -> None:
    shaper, recorder = observing(1)
    for i in range(8):
        shaper.arrive(document(str(i), first=1_000 * i), 0.0)
    whole = [Bucket("all", 131_072, 100, 60.0)]
    shaper.changes.reconfigure(whole, 0.1, observed=least_connections)
    shaper.arrive(document("first", first=9_000), 0.1)
    assert recorder.receipts.tally("all").observed == {"starts": 1}
    shaper.changes.add_backend(BackendSpec("b1", 4), 0.2)
    shaper.backend_up("b1", 0.2)
    shaper.changes.drain_backend("b0", 0.3)
    shaper.arrive(document("second", first=10_000), 0.4)
    would = recorder.receipts.under_way["second"].would
    assert would is not None
    assert would.backend == "b1"


def test_the_forecast_holds_no_more_than_its_queues() -> None:
    shaper, _ = observing(1)
    for i in range(3_000):
        shaper.arrive(Request(str(i), 4_000, 50), i / 1_000)
    shadow = shaper._shadow
    assert shadow is not None
    assert len(shadow._undecided) == len(list(shadow.shaper.waiting())) <= 100
    shaper.settle(100.0)
    assert not shadow._undecided
    assert not shadow._finishes
    assert all(backend.idle for backend in shadow.shaper.backends.values())


def test_beside_other_proxies_there_is_no_forecast() -> None:
    """Their requests would be missing in it."""
    shaper, recorder = observing(1)
    other, _ = observing(1)
    shaper.peering.reported("other", other.peering.report(0.0), 0.0)
    shaper.arrive(document("d"), 0.1)
    assert not recorder.receipts.tally("document").observed
    assert recorder.receipts.under_way["d"].would is None
    shaper.peering.gone("other", 1.0)
    shaper.arrive(document("e", first=1_000), 1.0)
    assert recorder.receipts.tally("document").observed == {"starts": 1}
