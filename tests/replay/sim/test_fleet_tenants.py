"""Tenants across proxies in virtual time: fair in seconds, and within quotas, through any proxy."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import pytest
from overload import ENGINE, Make, Played, chat, mix, poisson, shares
from stages.shared_fleet import Result
from stages.shared_fleet import play as play_several

from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import HISTORY, BackendSpec, Bucket, Reject, Request, Send, Tenant
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.elsewhere import SILENT_S
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.schema import TraceRequest

LONG_S = 1e6  # nothing is refused for its wait


def through(
    trace: Sequence[TraceRequest],
    proxies: int,
    tenants: Sequence[Tenant] = (),
    *,
    exchange: bool = True,
    seed: int = 1,
    pinned: Mapping[str, int] | None = None,
) -> Result:
    def new_shaper(names: list[str]) -> Shaper:
        # With 256 slots on an engine who is tied to one proxy of two gets half of its part.
        few = Config(backends=(BackendConfig(url="http://h:1", max_concurrency=64),))
        shaper = Scenario(tenants=tuple(tenants), proxy=few).new_policy(names)
        assert isinstance(shaper, Shaper)
        return shaper

    return play_several(
        trace,
        new_shaper,
        proxies=proxies,
        engines=2,
        seed=seed,
        exchange=exchange,
        config=ENGINE,
        pinned=pinned,
    )


def as_played(result: Result) -> Played:
    return Played(result.policy.shapers[0], list(result.outcomes))


@pytest.mark.parametrize(("make", "off"), [(chat, 0.1), (mix, 0.35)])  # documents are few
@pytest.mark.parametrize("seed", [1, 2])
def test_tenants_over_two_proxies_get_equal_parts(make: Make, off: float, seed: int) -> None:
    got = shares(
        (80, 15, 5), 3.0, 60.0, seed, make, lambda trace: as_played(through(trace, 2, seed=seed))
    )
    assert got == pytest.approx(dict.fromkeys(got, 1.0), abs=off)


def test_a_heavy_tenant_with_connections_to_all_proxies_gets_no_more_for_it() -> None:
    """The others use one proxy each: what is given at the other one must count there."""

    def parts(seed: int, exchange: bool) -> dict[str, float]:
        def several(trace: Sequence[TraceRequest]) -> Played:
            one_each = {"t1": 0, "t2": 1}
            return as_played(through(trace, 2, exchange=exchange, seed=seed, pinned=one_each))

        return shares((80, 15, 5), 3.0, 60.0, seed, chat, several)

    together = [parts(seed, True) for seed in (1, 2)]
    for name in together[0]:
        assert fmean(part[name] for part in together) == pytest.approx(1.0, abs=0.2), name
    assert parts(1, False)["t1"] < 0.7


@pytest.mark.parametrize("seed", [1, 2])
def test_a_quota_is_kept_but_for_what_a_tenth_of_a_second_brings(seed: int) -> None:
    """Ten times the quota is offered, half of it to each of two proxies."""
    seconds, quota = 60.0, Tenant("t", tokens_per_s=4_000.0, burst_tokens=12_000.0)
    offered_per_s = 10.0 * quota.tokens_per_s
    trace = poisson(chat, [(seconds, offered_per_s / 3_000.0)], seed, "t")
    allowed = quota.burst_tokens + quota.tokens_per_s * seconds

    def taken(result: Result) -> float:
        return sum(o.request.input_tokens for o in result.outcomes if o.served)

    together, strangers = (
        taken(through(trace, 2, [quota], exchange=exchange, seed=seed))
        for exchange in (True, False)
    )
    # What both take in before they hear of it is a debt that is paid back: it counts once.
    assert 0.85 * allowed < together < allowed + 0.2 * offered_per_s + 4_500
    assert strangers > 1.7 * allowed


def a_shaper(*tenants: Tenant) -> Shaper:
    shaper = Shaper([BackendSpec("a", 64)], [Bucket("all", 131_072, 999, LONG_S)], tenants=tenants)
    shaper.backend_up("a", 0.0)
    return shaper


def met(*tenants: Tenant) -> tuple[Shaper, Shaper]:
    """Two that know each other."""
    one, other = a_shaper(*tenants), a_shaper(*tenants)
    tell(one, other, 0.0)
    tell(other, one, 0.0)
    return one, other


def tell(one: Shaper, other: Shaper, now: float) -> list[str]:
    """The news of one; whom the other then sends."""
    actions = other.peering.reported(str(id(one)), one.peering.report(now), now)
    return [a.request.id for a in actions if isinstance(a, Send)]


def counter(shaper: Shaper, tenant: str) -> float:
    return shaper._state.fairness.counters()[tenant]


def test_what_was_given_elsewhere_is_charged_once_and_by_weight() -> None:
    one, other = met(Tenant("t", weight=2.0))
    one.arrive(Request("1", 10_000, tenant="t"), 0.1)
    given_s = one.backends["a"].in_flight["1"].prefill_s
    for now in (0.1, 0.2, 0.3):  # repeated, in case a message is lost
        tell(one, other, now)
    assert counter(other, "t") == pytest.approx(given_s / 2) == counter(one, "t")
    # It is charged to the one who gave it by that one itself, not by what others say.
    tell(other, one, 0.4)
    assert counter(one, "t") == pytest.approx(given_s / 2)


def test_corrections_reach_the_others_even_when_all_else_is_forgotten() -> None:
    one, other = met()
    one.arrive(Request("1", 10_000, tenant="t"), 0.1)
    tell(one, other, 0.1)
    one.first_token("1", 0.5)
    later = 0.5 + 2 * 1.5 * SILENT_S
    for step in range(8):
        now = 0.5 + (later - 0.5) * step / 7
        tell(one, other, now)
        tell(other, one, now)
    assert one.peering.report(later).tenants == {}
    one.used("1", 10, later, cached_tokens=9_000)
    one.finish("1", later)
    tell(one, other, later)
    assert counter(other, "t") == pytest.approx(counter(one, "t"))


def test_a_lost_message_costs_nothing() -> None:
    one, other = met(Tenant("t", tokens_per_s=1_000.0, burst_tokens=5_000.0))
    one.arrive(Request("1", 4_000, tenant="t"), 0.1)
    one.peering.report(0.2)  # lost
    tell(one, other, 0.3)
    (action,) = other.arrive(Request("2", 4_000, tenant="t"), 0.3)
    assert isinstance(action, Reject)
    assert action.reason == "tenant_quota"


def test_what_a_stranger_gave_before_we_met_is_no_news() -> None:
    one, friend, other = a_shaper(), a_shaper(), a_shaper()
    one.peering.reported("friend", friend.peering.report(0.0), 0.0)
    one.arrive(Request("1", 100_000, tenant="t"), 0.0)
    one.finish("1", 1.0)
    one.peering.reported("friend", friend.peering.report(2 * 1.5 * SILENT_S), 2 * 1.5 * SILENT_S)
    tell(one, other, 2 * 1.5 * SILENT_S)  # it no longer speaks of t ...
    one.arrive(Request("2", 1_000, tenant="t"), 2 * 1.5 * SILENT_S)
    tell(one, other, 2 * 1.5 * SILENT_S + 0.1)  # ... and begins anew
    assert counter(other, "t") == pytest.approx(one.backends["a"].in_flight["2"].prefill_s)


def test_one_who_was_away_comes_back_level_with_those_served_elsewhere() -> None:
    """As with one proxy, an unused share does not accumulate."""
    one, other = met()
    for number in range(10):
        one.arrive(Request(str(number), 10_000, tenant="busy"), 0.4 * number)
        tell(one, other, 0.4 * number)
        one.first_token(str(number), 0.4 * number + 0.3)
        one.finish(str(number), 0.4 * number + 0.3)
    before = counter(other, "busy")
    other.arrive(Request("n", 1_000, tenant="new"), 4.0)
    assert counter(other, "new") > 0.5 * before


def test_a_message_names_no_more_tenants_than_it_may() -> None:
    one, other = met()
    for number in range(HISTORY + 50):
        one.arrive(Request(str(number), 10, tenant=f"t{number}"), 0.1 + number * 1e-6)
    assert len(one.peering.report(0.2).tenants) == HISTORY
    assert one.peering.report(0.1 + 2 * 1.5 * SILENT_S).tenants == {}
    assert other.peering.report(0.2).tenants == {}
