"""A request whose backend stopped in the middle of its answer asks others for the rest of it."""

from math import inf

from core_requests import all_up

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import BackendSpec, Bucket, Reject, Request, Send
from forebay.proxy.core.shaper import Shaper

PROMPT, DONE = 1_000, 45


def made(*names: str, slots: int = 1, max_queue: int = 9) -> Shaper:
    specs = [BackendSpec(name, slots) for name in names]
    buckets = [Bucket("chat", 5_000, max_queue, 20.0)]
    return all_up(Shaper(specs, buckets, recorder=DecisionRecorder(9)))


def asked(id_: str, timeout_s: float = 10.0) -> Request:
    return Request(id_, PROMPT, output_tokens=200, timeout_s=timeout_s)


def rest(id_: str) -> Request:
    return asked(id_).with_(prompt_tokens=PROMPT + DONE, output_tokens=200 - DONE, timeout_s=inf)


def streaming(shaper: Shaper, id_: str, now: float) -> str:
    """Send a request, which has its first token after a second. Returns where."""
    (sent,) = shaper.arrive(asked(id_), now)
    assert isinstance(sent, Send)
    shaper.first_token(id_, now + 1.0)
    return sent.backend


def test_it_is_sent_elsewhere_with_its_longer_prompt() -> None:
    shaper = made("a", "b")
    failed = streaming(shaper, "1", 0.0)
    (sent,) = shaper.retry("1", 60.0, rest=rest("1"))  # long after its timeout for a first token
    assert isinstance(sent, Send)
    assert sent.backend != failed
    assert (sent.queued_s, sent.request.prompt_tokens) == (0.0, PROMPT + DONE)
    (running,) = shaper.backends[sent.backend].in_flight.values()
    assert running.context_tokens >= PROMPT + DONE
    receipt = shaper.recorder.receipts.find("1")
    assert receipt is not None
    assert (receipt.sent_at, receipt.first_token_at, receipt.tries) == (0.0, 1.0, 1)
    step = receipt.steps[-1]
    assert (step.kind, step.backend, step.why) == ("continued", sent.backend, "45")
    shaper.first_token("1", 61.0)
    shaper.finish("1", 70.0)
    assert receipt.state == "ended"
    assert shaper.recorder.receipts.tally("chat").admitted["met"] == 1
    assert all(backend.idle for backend in shaper.backends.values())


def test_it_goes_before_what_came_later_and_into_a_full_queue() -> None:
    shaper = made("a", "b", max_queue=2)
    failed = streaming(shaper, "1", 0.0)
    other = streaming(shaper, "2", 0.0)
    for number in (3, 4):
        assert shaper.arrive(asked(str(number)), 5.0) == []
    shaper.backend_down(failed, 6.0)
    assert shaper.retry("1", 6.0, rest=rest("1")) == []
    assert shaper.queued("chat") == 3
    (sent,) = shaper.finish("2", 8.0)
    assert isinstance(sent, Send)
    assert (sent.request.id, sent.backend, sent.queued_s) == ("1", other, 2.0)


def test_its_wait_is_bounded_and_ends_its_record() -> None:
    shaper = made("a", "b")
    streaming(shaper, "1", 0.0)
    streaming(shaper, "2", 0.0)
    assert shaper.retry("1", 6.0, rest=rest("1")) == []
    assert shaper.wake(25.9) == []
    (left,) = shaper.wake(26.0)
    assert isinstance(left, Reject)
    tally = shaper.recorder.receipts.tally("chat").admitted
    assert (tally["met"], tally["refused"]) == (2, 0)
    receipt = shaper.recorder.receipts.find("1")
    assert receipt is not None
    assert receipt.state == "ended"


def test_a_client_that_leaves_meanwhile_had_its_first_token() -> None:
    shaper = made("a", "b")
    streaming(shaper, "1", 0.0)
    streaming(shaper, "2", 0.0)
    assert shaper.retry("1", 6.0, rest=rest("1")) == []
    shaper.cancel("1", 7.0)
    assert shaper.recorder.receipts.tally("chat").admitted["unanswered"] == 0
    shaper.finish("2", 8.0)
    assert all(backend.idle for backend in shaper.backends.values())


def test_it_may_come_back_to_where_it_was() -> None:
    shaper = made("a", "b")
    first = streaming(shaper, "1", 0.0)
    (moved,) = shaper.retry("1", 5.0, rest=rest("1"))
    shaper.first_token("1", 6.0)
    (back,) = shaper.retry("1", 9.0, rest=rest("1"))
    assert isinstance(moved, Send)
    assert isinstance(back, Send)
    assert [moved.backend != first, back.backend] == [True, first]


def test_without_another_backend_it_is_rejected() -> None:
    shaper = made("a")
    streaming(shaper, "1", 0.0)
    (left,) = shaper.retry("1", 5.0, rest=rest("1"))
    assert isinstance(left, Reject)
    assert left.reason == "no_backend_available"
    assert all(backend.idle for backend in shaper.backends.values())
