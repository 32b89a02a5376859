"""replay/send/dispatch.py: a closed loop reports when its own client was the bottleneck."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stages.replay_server import rows, run_one, table

from forebay.replay.clock.spare_time import SpareTime
from forebay.replay.parts import sender
from forebay.replay.plan.schedule import Arrivals
from forebay.replay.plan.target import parse_targets
from forebay.replay.send.bodies import PreparedQueue, PreparedRequest
from forebay.replay.send.dispatch import Dispatch
from forebay.replay.send.http.exchange import ClientExchange

BODY_S = 0.05


class SlowWindow(PreparedQueue):
    """Two bodies ahead; each takes 50 ms to make."""

    def __init__(self) -> None:
        super().__init__(most=2)

    async def put(self, item: PreparedRequest) -> None:
        await asyncio.sleep(BODY_S)
        await super().put(item)


def test_a_closed_loop_that_waits_for_its_bodies_is_client_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots, answers of 25 ms, a body every 50 ms: a slot is free for 75 ms before its next."""
    monkeypatch.setattr(sender, "PreparedQueue", SlowWindow)
    summary, _ = run_one(tmp_path / "run", rows(20), arrivals=Arrivals("closed", 2))
    told, kept = summary.values, table(summary.folder)
    assert (told["completed"], told["verdict"]) == (20, "client-limited")
    assert "of 20 requests left more than 20 ms after their slot was free" in told["verdict_reason"]
    assert told["verdict_at_s"] == pytest.approx(0.025)
    assert told["schedule_lag_ms"]["p50"] == pytest.approx(75, rel=2e-3)
    for earlier, row in zip(kept, kept[2:], strict=False):
        assert row["intended_s"] == earlier["done_s"]  # whose slot it has
        assert row["cap_wait_s"] == 0.0
    assert kept[10]["pacing_lag_s"] == pytest.approx(2 * BODY_S - 0.025)
    assert kept[10]["ttft_response_s"] == pytest.approx(kept[10]["ttft_service_s"] + 0.075)


async def test_the_first_round_of_a_closed_loop_does_not_wait_for_itself() -> None:
    """Sending costs 1 ms of the loop: a hundred at once leave one by one, each in its own turn."""
    at_s = 0.0
    sent: list[ClientExchange] = []

    def begin(_r: object, _b: object, exchange: ClientExchange, *more: Any) -> None:
        nonlocal at_s
        exchange.sent_s = at_s
        sent.append(exchange)
        at_s += 0.001
        asyncio.get_running_loop().call_later(1.0, more[-1], exchange)

    window = PreparedQueue()
    for at, request in enumerate(rows(100)):
        await window.put(PreparedRequest(at, request, [b"{}"], 2))
    window.close()
    clock: Any = SimpleNamespace(now=lambda: at_s, virtual=True)
    client: Any = SimpleNamespace(
        begin=begin, watch=lambda _: object(), route=str, spare=SpareTime(clock)
    )
    async with asyncio.TaskGroup() as tasks:
        dispatch = Dispatch(
            clock,
            client,
            window,
            parse_targets(["http://127.0.0.1:1"]),
            max_in_flight=100,
            run_id="x",
            tasks=tasks,
            on_sent=lambda: None,
            on_ended=lambda request, exchange: None,
        )
        await dispatch.closed_loop(None)
    assert len(sent) == 100
    assert max(one.sent_s - one.intended_s for one in sent) <= 0.001
