"""A large fleet: which backends are priced for a request, and which are kept clear for chats."""

from math import inf

import pytest
from core_requests import sent_to

from forebay.proxy.core.model import BackendSpec, Bucket, Request
from forebay.proxy.core.shaper import Shaper

CHAT = Bucket("chat", 5_000, max_wait_s=2.0)
DOCUMENT = Bucket("document", 131_072, max_wait_s=30.0)


def a_fleet(backends: int, chunk_tokens: float = inf) -> Shaper:
    names = [f"gpu{number}" for number in range(backends)]
    shaper = Shaper(
        [BackendSpec(name, 64, chunk_tokens=chunk_tokens) for name in names], [CHAT, DOCUMENT]
    )
    for name in names:
        shaper.backend_up(name, 0.0, 1e6)
    for number in range(2):  # chats flow
        send_chat(shaper, f"first{number}", 0.0)
    return shaper


def send_chat(shaper: Shaper, name: str, now: float) -> str:
    """Send a chat and answer it at once. Returns its backend, or "" if it is not sent at once."""
    found = sent_to(shaper.arrive(Request(name, 500, 20), now))
    if not found:
        return ""
    shaper.first_token(name, now + 0.03)
    shaper.finish(name, now + 0.05)
    return found[0]


def test_chats_find_the_clear_backend_for_which_documents_wait() -> None:
    shaper = a_fleet(10)
    busy = [sent_to(shaper.arrive(Request(f"d{n}", 100_000, 20), 0.1)) for n in range(12)]
    taken = {name for names in busy for name in names}
    (clear,) = shaper.backends.keys() - taken
    assert shaper.backends[clear].queued == 2
    assert [send_chat(shaper, f"c{n}", 0.2 + 0.1 * n) for n in range(5)] == [clear] * 5


@pytest.mark.parametrize(
    ("backends", "chunk_tokens", "worked_s", "clear"),
    [
        (4, inf, 40.0, 1), (8, inf, 0.0, 1), (8, inf, 3.0, 1), (8, inf, 8.0, 2),
        (16, inf, 8.0, 2), (16, inf, 40.0, 4),
        (2, 2_048, 9.0, 0), (4, 2_048, 1.0, 0), (4, 2_048, 4.0, 1), (8, 2_048, 8.0, 2),
    ],
)  # fmt: skip
def test_as_many_backends_are_kept_clear_as_chats_need(
    backends: int, chunk_tokens: float, worked_s: float, clear: int
) -> None:
    """Chats have had `worked_s` of prefills in the last 10 s. At most a quarter is kept clear."""
    shaper = a_fleet(backends, chunk_tokens)
    shaper.backends["gpu0"].worked["chat"].add(worked_s, 0.0)
    taken = [sent_to(shaper.arrive(Request(f"d{n}", 100_000, 20), 0.01)) for n in range(20)]
    assert len({name for names in taken for name in names}) == backends - clear


def test_a_queue_stands_from_its_first_request_until_none_waits() -> None:
    shaper = a_fleet(1)
    queues = shaper._state.queues
    for number in range(4):
        shaper.arrive(Request(f"d{number}", 100_000, 20), 0.1 * number)
    since = min(waiting.arrived_at for waiting in queues.waiting.values())
    assert queues.queued_s("document", "", 5.0) == 5.0 - since
    assert queues.queued_s("chat", "", 5.0) == 0.0
    first, *others = queues.waiting
    shaper.cancel(first, 5.0)
    assert queues.queued_s("document", "", 5.0) == 5.0 - since  # others wait
    assert others
    for name in others:
        shaper.cancel(name, 6.0)
    assert queues.queued_s("document", "", 7.0) == 0.0
