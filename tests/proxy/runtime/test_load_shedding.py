"""A proxy that is itself overloaded sheds the least urgent requests first."""

import asyncio
import resource
import time

import pytest
from said import Said
from stages.proxy_stage import on_stage

from forebay.proxy.config.sections import Limits
from forebay.proxy.core.model import ServiceClass
from forebay.proxy.log_events import INFO, WARNING
from forebay.proxy.runtime.load_shedding import Protection, Reading, next_shed, refused
from forebay.proxy.runtime.memory import memory_limit, resident_bytes
from forebay.traces.ground.event_loop import background


@pytest.mark.parametrize(
    ("shed", "reading", "then"),
    [
        (0, Reading(), 0),
        (0, Reading(1.0, 1.0, 0.8, 0.8), 0),  # at the limit is not over it
        (0, Reading(lag=1.1), 1),
        (0, Reading(memory=0.81), 1),
        (0, Reading(descriptors=0.81), 1),
        (0, Reading(memory=0.99), 1),  # one step at a time
        (1, Reading(lag=50.0, usual_lag=0.9), 1),  # late now and then
        (1, Reading(lag=50.0, usual_lag=1.1), 2),
        (2, Reading(lag=50.0, usual_lag=0.95), 2),
        (2, Reading(lag=50.0, usual_lag=0.9), 1),
        (2, Reading(lag=50.0, usual_lag=50.0), 2),  # a busy loop still serves the most urgent
        (1, Reading(descriptors=0.91), 2),
        (2, Reading(memory=0.96), 3),
        (3, Reading(memory=0.96), 3),
        (3, Reading(memory=0.87), 3),  # neither too much nor calm
        (3, Reading(memory=0.85), 2),
        (1, Reading(lag=0.95), 1),
        (1, Reading(lag=0.9, memory=0.72), 0),
        (1, Reading(), 0),
    ],
)
def test_how_many_classes_are_refused(shed: int, reading: Reading, then: int) -> None:
    assert next_shed(shed, reading) == then


@pytest.mark.parametrize(
    ("shed", "served"),
    [
        (0, {"interactive", "standard", "batch"}),
        (1, {"interactive", "standard"}),
        (2, {"interactive"}),
        (3, set()),
    ],
)
def test_the_least_urgent_class_goes_first(shed: int, served: set[str]) -> None:
    classes: tuple[ServiceClass, ...] = ("interactive", "standard", "batch")
    assert {c for c in classes if not refused(c, shed)} == served


def test_memory_and_its_limit_are_measured() -> None:
    assert resident_bytes() > 10 << 20
    assert memory_limit(Limits(memory=1 << 30)) == 1 << 30
    assert memory_limit(Limits()) > 64 << 20


async def test_out_of_descriptors_is_no_reason_to_take_more() -> None:
    """Looking takes a descriptor, too."""
    protection = Protection(Limits(memory=1 << 30), print, lambda lag_s: None)
    protection.decide()
    before = protection.reading.memory
    assert before > 0.01
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        protection.decide()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert protection.reading == Reading(memory=before, descriptors=1.0)
    assert protection.shed > 0


async def test_the_task_samples_lag_and_decides_once_a_second() -> None:
    readings, said, lags = (
        [Reading(memory=0.91)] * 2 + [Reading()] * 2,
        Said(),
        list[float](),
    )
    asked: list[float] = []

    def read(lag_p99_s: float, lag_median_s: float) -> Reading:
        asked.append(lag_p99_s)
        return readings.pop(0) if readings else Reading()

    protection = Protection(Limits(), said, lags.append, read)
    async with background(protection.run()):
        shed = []
        for _ in range(4):
            await asyncio.sleep(1.1)
            shed.append(protection.shed)
    assert shed == [1, 2, 1, 0]
    assert len(asked) == 4
    assert len(lags) >= 80
    assert [event.level for event, *_ in said.events] == [WARNING, WARNING, INFO]
    assert said[0] == "overloaded (memory): rejecting 1 of 3 service classes"


@pytest.mark.parametrize("computes", [True, False])
@pytest.mark.real_time
async def test_only_what_the_process_computes_counts_as_too_much_to_do(computes: bool) -> None:
    """A machine that stands still makes the loop late too; that is reported, and sheds nothing."""

    def hold_up() -> None:
        if not computes:
            time.sleep(0.12)
            return
        until = time.process_time() + 0.12  # others on this machine do not shorten it
        while time.process_time() < until:
            pass

    asked, lags = list[float](), list[float]()

    def read(lag_p99_s: float, lag_median_s: float) -> Reading:
        asked.append(lag_p99_s)
        return Reading()

    async with background(Protection(Limits(), print, lags.append, read).run()):
        while not asked:
            await asyncio.sleep(0.03)
            hold_up()
    assert max(lags) > 0.05
    assert (asked[0] > 0.02) == computes


async def test_a_refused_class_gets_503_and_the_next_is_served() -> None:
    async with on_stage(None) as (on, (backend,)):
        on.proxy.protection.shed = 2
        async with on.post() as answer:
            assert answer.status == 503
            error = (await answer.json())["error"]
            assert (error["code"], error["type"]) == ("overloaded", "server_error")
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.headers["x-request-id"]
        assert not backend.calls
        text = on.proxy.metrics.text().decode()
        assert 'forebay_shed_total{class="standard"} 1.0' in text
        assert "forebay_shedding_classes 2.0" in text
        on.proxy.protection.shed = 1
        assert await on.status() == 200
