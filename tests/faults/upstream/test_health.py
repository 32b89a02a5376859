"""The state machine of backend health, at literal times and under any events."""

import asyncio
from math import inf
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stages.proxy_stage import on_stage, stream

from forebay.proxy.backends.retries import LEAST, RetryBudget, Tries
from forebay.proxy.core.health import ANY, HOLD_S, LONGEST_HOLD_S, NONE, SILENT, Health, Intake
from forebay.proxy.core.model import BackendSpec, Bucket, Request, Send, UpModels
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.http1.client.patience import Patience
from forebay.replay.clock.virtual_loop import VirtualClockLoop


class Fleet:
    """Backends a, b, c ..., up at 0; what each may be sent is kept as a driver would."""

    def __init__(self, size: int) -> None:
        self.names = "abcdef"[:size]
        self.health = Health(self.names)
        self.may: dict[str, float] = dict.fromkeys(self.names, NONE)
        for name in self.names:
            self.health.probe_passed(name, 0.0)
        self.look(0.0)
        self.sent = 0

    def look(self, now: float) -> None:
        for intake in self.health.intakes(now):
            self.may[intake.backend] = intake.most_prefills

    def fail(self, name: str, now: float, times: int = 1, **how: bool) -> None:
        for _ in range(times):
            self.health.failed(name, "", now, **how)
        self.look(now)

    def answer(self, name: str, now: float, took_s: float = 0.1, predicted_s: float = 0.1) -> None:
        self.sent += 1
        self.health.sent(name, str(self.sent), predicted_s, now - took_s)
        self.health.answered(name, str(self.sent), now)
        self.look(now)


def test_three_failures_in_a_row_put_one_out() -> None:
    fleet = Fleet(2)
    fleet.fail("a", 1.0, times=2)
    fleet.answer("a", 1.5)
    fleet.fail("a", 2.0, times=2)
    assert fleet.may == {"a": ANY, "b": ANY}
    fleet.fail("a", 2.0)
    assert fleet.may == {"a": NONE, "b": ANY}


async def test_the_work_for_a_probe_does_not_depend_on_the_number_of_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a change looks at all of them, and at each of them once."""
    asked: list[str] = []
    real = UpModels.only_its

    def counted(self: UpModels, models: frozenset[str] | None, *, up: bool) -> Any:
        asked.append("only_its")
        return real(self, models, up=up)

    monkeypatch.setattr(UpModels, "only_its", counted)
    health = Health(map(str, range(200)))
    for name in range(200):
        health.probe_passed(str(name), 0.0)
        health.probe_passed(str(name), 0.1)
    assert not asked
    health.intakes(0.2)
    assert len(asked) == 200

    async with on_stage(None, None, health={"interval": "1s"}) as (_, _):
        await asyncio.sleep(3)
        asked.clear()
        await asyncio.sleep(20)
        assert not asked  # forty probes, and nothing has changed


def test_an_ejected_backend_that_goes_down_has_lost_its_cache() -> None:
    """The usual order when an engine dies: errors first, then its health check fails."""
    fleet = Fleet(2)
    fleet.fail("a", 1.0, times=3)
    fleet.health.probe_failed("a", "no connection", 1.1)
    assert fleet.health.intakes(1.1) == []
    fleet.health.probe_failed("a", "no connection", 1.2)
    assert fleet.health.intakes(1.2) == [Intake("a", NONE, restarted=True)]
    assert fleet.health.intakes(1.3) == []


def test_an_ejected_backend_keeps_the_models_that_no_other_serves() -> None:
    fleet = Fleet(2)
    both, one = frozenset({"base", "adapter"}), frozenset({"base"})
    fleet.health.set_models("a", both)
    fleet.health.set_models("b", one)
    assert fleet.health.intakes(0.5) == []
    for _ in range(3):
        fleet.health.failed("a", "", 1.0)
    assert fleet.health.intakes(1.0) == [
        Intake("a", ANY, restarted=False, only=frozenset({"adapter"}))
    ]
    trial = 1.0 + HOLD_S
    assert fleet.health.intakes(trial) == [Intake("a", 1.0, restarted=False)]
    fleet.answer("a", trial + 0.5)
    assert fleet.may == {"a": ANY, "b": ANY}


def test_half_open_takes_one_and_closes_on_a_good_answer() -> None:
    fleet = Fleet(2)
    fleet.fail("a", 1.0, times=3)
    assert fleet.health.wake_at(1.0) == 1.0 + HOLD_S
    fleet.health.probe_passed("a", 1.2)  # /health was never what was wrong
    fleet.look(1.2)
    assert fleet.may["a"] == NONE
    fleet.look(1.5)
    assert fleet.may["a"] == 1
    fleet.answer("a", 1.6, took_s=0.05)
    assert fleet.may["a"] == ANY


def test_a_failed_trial_doubles_the_hold_up_to_its_bound() -> None:
    fleet, now, holds = Fleet(2), 1.0, []
    fleet.fail("a", now, times=3)
    for _ in range(9):
        holds.append(fleet.health.wake_at(now) - now)
        now = fleet.health.wake_at(now)
        fleet.look(now)
        assert fleet.may["a"] == 1
        fleet.fail("a", now)
    assert holds == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_long_good_time_forgets_the_holds() -> None:
    fleet, now = Fleet(2), 1.0
    fleet.fail("a", now, times=3)
    fleet.look(1.5)
    fleet.answer("a", 1.6, took_s=0.05)
    fleet.fail("a", 10.0, times=3)
    assert fleet.health.wake_at(10.0) == 11.0  # soon after: twice as long
    fleet.look(11.0)
    fleet.answer("a", 11.1, took_s=0.05)
    fleet.fail("a", 100.0, times=3)
    assert fleet.health.wake_at(100.0) == 100.5


def test_two_failed_probes_take_one_down_and_a_good_one_takes_it_back() -> None:
    fleet = Fleet(2)
    fleet.health.probe_failed("a", "health 503", 1.0)
    fleet.health.probe_passed("a", 2.0)
    fleet.health.probe_failed("a", "health 503", 3.0)
    fleet.look(3.0)
    assert fleet.may["a"] == ANY
    fleet.health.probe_failed("a", "health 503", 4.0)
    fleet.look(4.0)
    assert (fleet.may["a"], fleet.health.status("a", 0.0)["why"]) == (NONE, "health 503")
    fleet.health.probe_passed("a", 5.0)
    fleet.look(5.0)
    assert fleet.may["a"] == ANY


def test_flapping_is_damped() -> None:
    """A backend that alternates between failure and health gets work every 2 s at most."""
    fleet, now, ups = Fleet(2), 0.0, 0
    while now < 120.0:
        now += 0.5
        if fleet.may["a"] == ANY:
            ups += 1
            fleet.fail("a", now, times=3, refused=True)
        fleet.health.probe_passed("a", now)
        fleet.look(now)
    assert 45 <= ups <= 60
    assert fleet.may["b"] == ANY


def test_a_flapping_one_is_taken_back_at_once_when_nobody_else_is_up() -> None:
    """Two that are restarted in turn: one of them always serves."""
    fleet, now = Fleet(2), 0.0
    for turn in range(20):
        gone, there = ("a", "b") if turn % 2 else ("b", "a")
        fleet.fail(gone, now, times=3, refused=True)
        fleet.health.probe_passed(there, now)
        fleet.look(now)
        assert (fleet.may[gone], fleet.may[there]) == (NONE, ANY)
        now += 0.5


def test_full_is_a_pause_and_no_failure() -> None:
    fleet = Fleet(1)
    pauses = []
    now = 1.0
    for _ in range(7):
        for _ in range(5):
            fleet.health.full("a", "", now)  # those sent together
        fleet.look(now)
        assert fleet.may["a"] == 0
        pauses.append(fleet.health.wake_at(now) - now)
        now = fleet.health.wake_at(now)
        fleet.look(now)
        assert fleet.may["a"] == ANY
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert fleet.health.state("a") == "up"
    fleet.answer("a", now)
    fleet.health.full("a", "", now, retry_after_s=3.0)
    assert fleet.health.wake_at(now) == now + 3.0


def test_gray_is_late_against_prediction_and_peers() -> None:
    fleet = Fleet(3)
    for i in range(6):
        fleet.answer("a", 1 + i, took_s=2.0, predicted_s=0.2)
        fleet.answer("b", 1 + i, took_s=0.3, predicted_s=0.2)
        fleet.answer("c", 1 + i, took_s=0.2, predicted_s=0.2)
    fleet.health.look_for_gray(7.0)
    fleet.look(7.0)
    assert fleet.may == {"a": NONE, "b": ANY, "c": ANY}
    assert "as late as predicted" in str(fleet.health.status("a", 0.0)["why"])
    fleet.look(7.5)
    fleet.health.sent("a", "trial", 0.2, 7.5)
    fleet.health.answered("a", "trial", 9.5)  # still late
    fleet.look(9.5)
    assert fleet.may["a"] == NONE
    fleet.look(10.5)
    fleet.answer("a", 10.8, took_s=0.2, predicted_s=0.2)
    assert fleet.may["a"] == ANY


def test_gray_counts_those_that_still_wait() -> None:
    fleet = Fleet(2)
    for i in range(6):
        fleet.health.sent("a", f"hung{i}", 0.1, 1.0)
        fleet.answer("b", 1.5)
    fleet.health.look_for_gray(4.0)
    fleet.look(4.0)
    assert fleet.may == {"a": NONE, "b": ANY}


@pytest.mark.parametrize(
    "b_took_s",
    [
        2.0,  # all are late: the prediction is wrong, or the load is
        None,  # nobody to compare with
    ],
)
def test_not_gray(b_took_s: float | None) -> None:
    fleet = Fleet(2)
    for i in range(6):
        fleet.answer("a", 1 + i, took_s=2.0, predicted_s=0.2)
        if b_took_s:
            fleet.answer("b", 1 + i, took_s=b_took_s, predicted_s=0.2)
    fleet.health.look_for_gray(7.0)
    fleet.look(7.0)
    assert fleet.may == {"a": ANY, "b": ANY}


def test_the_last_one_is_not_ejected() -> None:
    fleet = Fleet(2)
    fleet.fail("a", 1.0, times=3)
    fleet.fail("b", 1.1, times=3)
    assert fleet.may == {"a": ANY, "b": ANY}  # panic
    fleet.answer("b", 1.2, took_s=0.05)
    assert fleet.may == {"a": NONE, "b": ANY}  # one is known to be good again


def test_panic_does_not_call_a_refusing_one_up() -> None:
    fleet = Fleet(2)
    fleet.fail("a", 1.0, times=3, refused=True)
    fleet.fail("b", 1.0, times=3)
    assert fleet.may == {"a": NONE, "b": ANY}
    fleet.fail("b", 1.1, times=3, refused=True)
    assert fleet.may == {"a": NONE, "b": NONE}


def test_backends_come_and_go() -> None:
    fleet = Fleet(2)
    fleet.fail("a", 1.0, times=3)
    fleet.health.remove("b")
    fleet.look(1.0)
    assert fleet.may["a"] == ANY  # it is the last one now
    fleet.health.add("n", 1.0)
    assert fleet.health.status("n", 1.0)["state_s"] == 0.0
    fleet.health.failed("b", "x", 1.0)  # what is still told of it is ignored
    fleet.health.probe_passed("n", 1.0)
    fleet.look(1.0)
    assert fleet.may["n"] == ANY


def late_beside_a_drained_backend() -> Fleet:
    """b has served well until an operator drains it, and a is 3.3 times late since."""
    fleet = Fleet(2)
    for i in range(6):
        fleet.answer("b", 5 + i, took_s=1.0, predicted_s=1.0)
    fleet.health.drain("b", drained=True)
    for i in range(6):
        fleet.answer("a", 5 + i, took_s=3.3, predicted_s=1.0)
    return fleet


def test_a_drained_backend_is_no_peer() -> None:
    fleet = late_beside_a_drained_backend()
    fleet.health.look_for_gray(11.0)
    fleet.look(11.0)
    assert fleet.health.state("a") == "up"
    assert fleet.may["a"] == ANY
    fleet.health.drain("b", drained=False)
    fleet.health.look_for_gray(11.0)
    assert fleet.health.state("a") == "ejected"


@pytest.mark.parametrize("gone", ["drained", "asleep", "down", "removed"])
def test_the_last_available_backend_is_used_however_the_other_went(gone: str) -> None:
    fleet = Fleet(2)
    match gone:
        case "drained":
            fleet.health.drain("b", drained=True)
        case "asleep":
            fleet.health.fell_asleep("b", 1.0)
        case "down":
            fleet.health.probe_failed("b", "x", 1.0)
            fleet.health.probe_failed("b", "x", 1.0)
        case "removed":
            fleet.health.remove("b")
    fleet.fail("a", 2.0, times=4)
    assert fleet.may["a"] == ANY
    fleet.look(2.0 + HOLD_S)
    assert fleet.may["a"] == ANY  # half-open, and not one request at a time
    fleet.answer("a", 20.0, took_s=9.0)
    assert fleet.health.state("a") == "up"


def test_a_drained_backend_lets_a_good_probe_end_the_hold_of_the_other() -> None:
    fleet = Fleet(2)
    fleet.health.drain("b", drained=True)
    fleet.fail("a", 2.0, times=3, refused=True)
    fleet.health.probe_passed("a", 2.1)
    assert fleet.health.state("a") == "up"


def test_a_sleeping_backend_is_up_with_the_first_probe_after_it_wakes() -> None:
    """However often it sleeps: no time out of rotation follows. Its cache is lost."""
    fleet = Fleet(2)
    for i in range(1, 9):
        fleet.health.fell_asleep("a", float(i))
        assert fleet.health.intakes(float(i)) == [Intake("a", NONE, restarted=True)]
        assert fleet.health.state("a") == "asleep"
        fleet.fail("a", i + 0.1, times=5)  # requests that were sent before
        fleet.health.probe_passed("a", i + 0.5)
        fleet.look(i + 0.5)
        assert fleet.may["a"] == ANY


class Anything(RuleBasedStateMachine):
    """Any events in any order; `down` is modelled here on its own."""

    @initialize(size=st.integers(1, 4))
    def begin(self, size: int) -> None:
        self.fleet = Fleet(size)
        self.now = 0.0
        self.streak = dict.fromkeys(self.fleet.names, 0)
        self.drained: set[str] = set()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 20.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(at=st.integers(0, 3), what=st.sampled_from(["fail", "refuse", "full", "left", "late"]))
    def something(self, at: int, what: str) -> None:
        name = self.fleet.names[at % len(self.fleet.names)]
        health = self.fleet.health
        health.sent(name, "r", 0.1, self.now)
        match what:
            case "fail" | "refuse":
                health.failed(name, "r", self.now, refused=what == "refuse")
            case "full":
                health.full(name, "r", self.now)
            case "left":
                health.left(name, "r")
            case "late":
                self.now += 5.0
                health.answered(name, "r", self.now)

    @rule(at=st.integers(0, 3), passed=st.booleans())
    def probe(self, at: int, passed: bool) -> None:
        name = self.fleet.names[at % len(self.fleet.names)]
        if passed:
            self.fleet.health.probe_passed(name, self.now)
        else:
            self.fleet.health.probe_failed(name, "x", self.now)
        self.fleet.health.look_for_gray(self.now)

    @rule(at=st.integers(0, 3), drained=st.booleans())
    def drain(self, at: int, drained: bool) -> None:
        name = self.fleet.names[at % len(self.fleet.names)]
        self.fleet.health.drain(name, drained=drained)
        (self.drained.add if drained else self.drained.discard)(name)

    @rule(at=st.integers(0, 3))
    def sleep(self, at: int) -> None:
        self.fleet.health.fell_asleep(self.fleet.names[at % len(self.fleet.names)], self.now)

    @invariant()
    def holds(self) -> None:
        fleet, health = self.fleet, self.fleet.health
        fleet.look(self.now)
        states = {name: health.state(name) for name in fleet.names}
        # What a driver was told is what the states mean.
        for name, state in states.items():
            if state in SILENT:
                assert fleet.may[name] == NONE
            if state == "up":
                assert fleet.may[name] in (ANY, 0)
        # Whoever is not down and does not sleep is used when nobody is up and undrained.
        if "up" not in {states[name] for name in states.keys() - self.drained}:
            for name, state in states.items():
                assert (fleet.may[name] == NONE) == (state in SILENT)
        # Nothing is ever stuck: time alone brings every `out` to trial.
        wake_at = health.wake_at(self.now)
        if "ejected" in states.values():
            assert self.now < wake_at <= self.now + LONGEST_HOLD_S
        assert health.intakes(self.now) == []  # said once
        assert not any(b.waiting for b in health._backends.values())

    def teardown(self) -> None:
        """However bad it was: with good probes and good answers all are up within a minute."""
        if not hasattr(self, "fleet"):
            return
        for _ in range(240):
            self.now += 0.5
            for name in self.fleet.names:
                self.fleet.health.probe_passed(name, self.now)
            self.fleet.look(self.now)
            for name in self.fleet.names:
                if self.fleet.may[name] in (1, ANY):
                    self.fleet.answer(name, self.now, took_s=0.0)
        assert set(self.fleet.may.values()) == {ANY}


Anything.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase


def test_requests_from_before_the_ejection_decide_no_trial() -> None:
    """Nor does a request whose first token cannot be seen, which may take long."""
    for good in (True, False):
        health = Health(["a", "b"])
        for name in ("a", "b"):
            health.probe_passed(name, 0.0)
        health.intakes(0.0)
        health.sent("a", "old", inf, 0.5)
        for number in range(3):
            health.failed("a", f"{number}", 1.0)
        health.intakes(1.0)
        health.intakes(1.0 + HOLD_S)
        assert health.state("a") == "half_open"
        if good:
            health.answered("a", "old", 2.0)
        else:
            health.failed("a", "old", 2.0)
        assert health.state("a") == "half_open"


class TestLateLoop:
    """The proxy itself stands still, so it sees answers to its probes late."""

    async def test_no_backend_is_called_dead_for_it(self) -> None:
        async with on_stage(stream, stream) as (on, backends):
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualClockLoop)
            for backend in backends:
                backend.pause_s = 0.1
            for _ in range(100):
                await asyncio.sleep(0.05)
                loop.now += 1.3  # the processor is busy with something else
            assert not [line for line in on.said if "down" in line]
            assert all(link.up for link in on.proxy.backends.links.values())

    async def test_a_backend_that_hangs_is_found_all_the_same(self) -> None:
        async with on_stage(stream, stream) as (on, backends):
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualClockLoop)
            backends[0].healthy = None
            for _ in range(60):
                await asyncio.sleep(0.05)
                loop.now += 1.3
            assert [line for line in on.said if "down" in line] == [
                "backend b0 is down (no health answer within 1 s)"
            ]

    @pytest.mark.parametrize("late_s", [0.0, 0.1])
    async def test_a_loop_that_is_on_time_waits_no_longer_than_asked(self, late_s: float) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClockLoop)
        began = loop.now
        loop.call_later(0.25, lambda: setattr(loop, "now", loop.now + late_s))
        with pytest.raises(TimeoutError), Patience(1.0):
            await asyncio.sleep(60)
        assert loop.now - began == pytest.approx(1.0, abs=late_s + 0.01)

    async def test_a_cancelled_wait_is_no_timeout(self) -> None:
        async def wait() -> None:
            with Patience(1.0):
                await asyncio.sleep(60)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestShaperTakesIt:
    """The shaper obeys the limits that health sets."""

    def shaper(self) -> Shaper:
        shaper = Shaper(
            [BackendSpec("a", 9), BackendSpec("b", 9)],
            [Bucket("chat", 5_000, max_queue=9, max_wait_s=50.0)],
            dispatch_ahead_s=100.0,
        )
        shaper.backend_up("a", 0.0)
        shaper.backend_up("b", 0.0)
        return shaper

    def test_nobody_waits_for_a_trial_while_another_takes_work(self) -> None:
        shaper = self.shaper()
        shaper.backend_up("a", 0.0, most_prefills=1)
        to = [shaper.arrive(Request(str(i), 100), 1.0)[0] for i in range(6)]
        backends = [action.backend for action in to if isinstance(action, Send)]
        assert sorted(backends) == ["a", *["b"] * 5]

    def test_a_pause_keeps_the_queue(self) -> None:
        shaper = self.shaper()
        shaper.backend_down("b", 0.0)
        shaper.backend_up("a", 0.0, most_prefills=0)
        assert shaper.arrive(Request("1", 100), 1.0) == []
        (action,) = shaper.backend_up("a", 1.2, most_prefills=inf)
        assert isinstance(action, Send)

    def test_out_of_work_is_not_out_of_cache(self) -> None:
        shaper = self.shaper()
        shaper.arrive(Request("1", 1024, blocks=(1, 2)), 1.0)
        held = shaper.backends["a"]
        shaper.backend_down("a", 2.0, keeps_cache=True)
        assert len(held.cache.prefixes) > 0
        shaper.backend_down("a", 2.0)
        assert len(held.cache.prefixes) == 0


class TestBudget:
    def test_a_share_of_those_at_work_and_never_twice(self) -> None:
        budget = RetryBudget()
        tries = [Tries(budget) for _ in range(50)]
        for one in tries:
            one.__enter__()
        assert [one.again("shared") for one in tries].count(True) == 5
        assert not tries[0].again("shared")
        assert not tries[0].again("lost")
        for one in tries:
            one.__exit__()
        assert (budget.active, budget.retrying) == (0, 0)

    def test_few_may_always(self) -> None:
        budget = RetryBudget()
        tries = [Tries(budget) for _ in range(5)]
        for one in tries:
            one.__enter__()
        assert [one.reserve() for one in tries].count(True) == LEAST

    def test_lost_connections_cost_no_share_and_refused_ones_no_attempt(self) -> None:
        with Tries(RetryBudget()) as tries:
            assert tries.again("refused")
            assert tries.again("refused")
            assert tries.again("lost")
            assert not tries.again("lost")
            assert not tries.again("never")
