"""Models of other routers in virtual time: each chooses as its documentation states."""

import pytest

from forebay.proxy.core.model import Reject, Request, Send
from forebay.replay.sim.router_models import ROUTER_MODELS, LeastConnectionsQueue, RouterModel
from forebay.replay.sim.scenario import ALL_KNOWING, DIRECT, Scenario, simulate
from forebay.traces.schema import TraceRequest
from forebay.traces.synth import shared_document


def started(name: str, engines: int = 2) -> RouterModel:
    peer = ROUTER_MODELS[name][0]()
    for number in range(engines):
        peer.backend_up(f"gpu{number}", 0.0, 100_000.0)
    return peer


def went(peer: RouterModel, name: str, first: int, blocks: int = 20) -> str:
    """Where a prompt goes that begins with block `first`."""
    ids = tuple(range(first, first + blocks))
    (action,) = peer.arrive(Request(name, 512 * blocks, 10, ids), 0.0)
    assert isinstance(action, Send)
    return action.backend


def test_least_connections_counts_requests_in_flight() -> None:
    peer = started("least_connections")
    first = went(peer, "a", 0)
    assert went(peer, "b", 0) != first
    peer.finish("a", 1.0)
    assert went(peer, "c", 100) == first
    assert peer.places[0].running == peer.places[1].running == 1


def test_a_hash_knows_no_load_and_a_bounded_one_does() -> None:
    blind, bounded = started("consistent_hash"), started("bounded_hash")
    assert len({went(blind, str(i), 0) for i in range(20)}) == 1
    split = [went(bounded, str(i), 0) for i in range(20)]
    assert sorted((split.count("gpu0"), split.count("gpu1"))) == [7, 13]  # 1.25 times the mean
    assert {went(blind, f"d{i}", 1_000 * i) for i in range(20)} == {"gpu0", "gpu1"}


def test_cache_aware_sticks_until_loads_differ_by_64() -> None:
    peer = started("cache_aware")
    home = went(peer, "0", 0)
    assert [went(peer, str(i), 0) for i in range(1, 65)] == [home] * 64
    assert went(peer, "65", 0) != home
    assert went(peer, "x", 5_000) != home  # nothing matched: the least loaded


def test_smg_leaves_only_the_engine_that_is_too_busy() -> None:
    peer = started("smg_cache_aware")
    home = went(peer, "0", 0)
    other = went(peer, "cold", 9_000)
    assert other != home
    placed = [went(peer, str(i), 0) for i in range(1, 40)]
    assert placed[:5] == [home] * 5
    assert placed.count(home) / len(placed) == pytest.approx(0.75, abs=0.06)
    assert went(peer, "again", 9_000) == other  # the other document stays


def test_a_match_of_less_than_its_part_of_the_prompt_counts_for_nothing() -> None:
    for name in ("cache_aware", "llm_d"):
        peer = started(name)
        home = went(peer, "a", 0, blocks=4)
        assert went(peer, "b", 0, blocks=20) != home  # 4 of 20 blocks


def test_llm_d_leaves_the_holder_when_it_is_18_seconds_behind() -> None:
    peer = started("llm_d")
    home = went(peer, "0", 0)
    count = int(18.0 * 15_928 / 10_240)
    assert [went(peer, str(i), 0) for i in range(1, count)] == [home] * (count - 1)
    assert {went(peer, f"late{i}", 0) for i in range(3)} > {home}


def test_dynamo_weighs_what_is_cached_against_what_is_under_way() -> None:
    peer = started("dynamo")
    home = went(peer, "a", 0)
    peer.first_token("a", 1.0)
    peer.finish("a", 1.0)
    assert went(peer, "b", 0) == home  # held
    assert went(peer, "c", 0) == home  # b's use of it, and this one again, cost 2 prompts
    assert went(peer, "d", 0) != home  # 3 prompts, and a cold one costs 2


def test_a_queue_in_front_sends_no_more_than_its_limit_and_gives_up_after_30_s() -> None:
    peer = LeastConnectionsQueue(1)
    peer.backend_up("gpu0", 0.0)
    assert len(peer.arrive(Request("a", 100), 0.0)) == 1
    assert peer.arrive(Request("b", 100), 1.0) == []
    assert peer.arrive(Request("c", 100), 2.0) == []
    (sent,) = peer.finish("a", 3.0)
    assert (sent.request.id, sent.queued_s) == ("b", 2.0)
    assert peer.wake_at() == 32.0
    (refused,) = peer.wake(32.0)
    assert isinstance(refused, Reject)
    assert refused.request.id == "c"


@pytest.mark.parametrize("policy", [DIRECT, *ROUTER_MODELS, ALL_KNOWING])
def test_everybody_serves_a_trace_to_the_end_and_leaves_nothing_behind(policy: str) -> None:
    rows = list(
        shared_document(users=30, document_tokens=8_192, rate_per_s=5.0, arrivals="poisson")
    )
    done = simulate(rows, Scenario(policy=policy))
    assert all(o.finished_s is not None for o in done.outcomes)
    again = simulate(rows, Scenario(policy=policy))
    assert [o.ttft_s for o in done.outcomes] == [o.ttft_s for o in again.outcomes]


def test_who_looks_into_the_engines_pays_for_a_document_once() -> None:
    rows = list(
        shared_document(users=30, document_tokens=8_192, rate_per_s=5.0, arrivals="poisson")
    )
    rows += [
        TraceRequest("cold", rows[-1].arrival_s + 9.0, 8_192, 8, tuple(range(10**6, 10**6 + 16)))
    ]
    done = simulate(rows, Scenario(policy=ALL_KNOWING))
    full = [o for o in done.outcomes if o.cached_tokens == 0]
    assert [o.request.id for o in full] == [rows[0].id, "cold"]
