"""The predicted wait in a prefill queue, and its margin."""

import pytest

from forebay.proxy.core.model import BackendSpec, Bucket, Request
from forebay.proxy.core.policy.admission import SURE
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.queue import QueuedRequest

CHAT = Bucket("chat", 5_000, max_queue=64, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_queue=64, max_wait_s=30.0)


def in_line(chats: int, *, document_at: float | None = None) -> tuple[Option, float]:
    """A chat's option behind so many that wait, and the usual share of its wait as a margin."""
    made = Shaper([BackendSpec("a", 64)], [CHAT, DOCUMENT])
    made.backend_up("a", 0.0)
    (backend,) = made.backends.values()
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
    (option,) = made._dispatcher.forecast.options(newcomer, 0.0)
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
