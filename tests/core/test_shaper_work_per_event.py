"""The work of an event does not grow with the requests and tenants that wait.

Counted in the interpreter's instructions, which do not depend on the machine.
"""

import sys
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import pytest
from core_requests import all_up

from forebay.proxy.core import shaper as core
from forebay.proxy.core.model import Action, BackendSpec, Bucket, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.queue import DueQueue, QueuedRequest

FEW, MANY = 32, 512  # waiting requests
GROWS = 1.3  # a heap's logarithm, and ties that fall otherwise
BUCKETS = (Bucket("chat", 5_000, 4_096, 600.0), Bucket("document", 128_000, 4_096, 900.0, 1))

pytestmark = pytest.mark.skipif(
    not core.__file__.endswith(".py"), reason="compiled code has no instructions to count"
)


def instructions(do: Callable[..., Any], *words: Any) -> tuple[int, Any]:
    """Return the number of instructions of a call, and its result."""
    seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        seen += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = do(*words)
    finally:
        sys.settrace(before)
    return seen, result


class Crowd:
    """Two engines whose KV cache is full, and `waiting` requests that lack it."""

    def __init__(self, waiting: int, tenants: int, lengths: Callable[[int], int]) -> None:
        specs = [BackendSpec(f"b{i}", 64, 200_000.0) for i in range(2)]
        self.shaper = all_up(Shaper(specs, BUCKETS, admit=lambda *_: None))
        self.numbers, self.tenants, self.lengths = count(), tenants, lengths
        self.running: list[str] = []
        self.now = 0.0
        while sum(1 for _ in self.shaper.waiting()) < waiting:
            self.now += 0.02
            self.started(self.shaper.arrive(self.request(), self.now))

    def request(self) -> Request:
        number = next(self.numbers)
        tenant = f"t{number % self.tenants}" if self.tenants else ""
        tokens = self.lengths(number)
        blocks = tuple(range(1_000 * number + 1, 1_000 * number + 1 + tokens // 512))
        return Request(f"r{number}", tokens, 32_000, blocks, 512.0, tenant=tenant)

    def started(self, actions: list[Action]) -> None:
        for action in actions:
            assert isinstance(action, Send), action
            self.running.append(action.request.id)
            self.started(self.shaper.first_token(action.request.id, self.now + 0.01))

    def events(self) -> dict[str, int]:
        """Return the instructions of one event of each kind."""
        shaper, costs = self.shaper, dict[str, int]()
        self.now += 1.0
        arrived = self.request()
        for name, do, words in (
            ("wake_at", shaper.wake_at, ()),
            ("arrive", shaper.arrive, (arrived, self.now)),
            ("wake", shaper.wake, (self.now,)),
            ("cancel", shaper.cancel, (arrived.id, self.now)),
            ("backend_up", shaper.backend_up, ("b0", self.now)),
            ("finish", shaper.finish, (self.running.pop(0), self.now)),
        ):
            costs[name], actions = instructions(do, *words)
            if name == "finish":
                # What starts in the room costs the same, however many wait behind it.
                costs[name] //= 1 + len(actions)
        return costs


def alike(_: int) -> int:
    return 7


def mixed(number: int) -> int:
    return number * 7919 % 4_000 + 7


@pytest.mark.parametrize("lengths", [alike, mixed])
@pytest.mark.parametrize("tenants", [0, 1, 2, 5])
def test_no_event_works_more_where_more_requests_wait(
    tenants: int, lengths: Callable[[int], int]
) -> None:
    few, many = (Crowd(number, tenants, lengths).events() for number in (FEW, MANY))
    for name, cost in many.items():
        assert cost <= GROWS * few[name] + 500, (name, few[name], cost)


def test_no_event_works_more_where_more_tenants_wait() -> None:
    few, many = (Crowd(number, number, alike).events() for number in (FEW, MANY))
    for name, cost in many.items():
        assert cost <= GROWS * few[name] + 500, (name, few[name], cost)


def test_a_place_in_the_middle_of_a_long_queue_costs_no_more() -> None:
    few, many = (questions_of(number) for number in (FEW, MANY))
    assert few == pytest.approx(many, abs=50)


def questions_of(waiting: int) -> int:
    """Return the instructions of all questions about a place in the middle of a queue."""
    queue = DueQueue()
    for order in range(waiting):
        queue.push(QueuedRequest(Request(f"r{order}", 7), "chat", 0.0, float(order), order, 1.0))

    def ask() -> None:
        queue.seconds_before(waiting / 2)
        queue.count_before(waiting / 2)
        queue.urgent(waiting / 2)

    return instructions(ask)[0]


def test_no_event_works_more_where_more_tenants_were_active_lately() -> None:
    few, many = (crowd_among(number) for number in (FEW, MANY))
    for name, cost in many.items():
        assert cost <= GROWS * few[name] + 500, (name, few[name], cost)


def crowd_among(tenants: int) -> dict[str, int]:
    """Return the instructions of each event after so many tenants were served."""
    crowd = Crowd(FEW, 2, alike)
    for number in range(tenants):
        crowd.now += 0.001
        request = Request(f"s{number}", 7, 32_000, tenant=f"s{number}")
        if crowd.shaper.arrive(request, crowd.now):
            crowd.shaper.finish(request.id, crowd.now)  # it was sent
        else:
            crowd.shaper.cancel(request.id, crowd.now)
    crowd.shaper.preview(Request("p", 7, 32_000, tenant="stranger"), crowd.now)
    costs = crowd.events()
    crowd.now += 1.0
    stranger = Request("stranger", 7, 32_000, tenant="stranger")
    costs["preview"], _ = instructions(crowd.shaper.preview, stranger, crowd.now)
    costs["stranger"], _ = instructions(crowd.shaper.arrive, stranger, crowd.now)
    return costs
