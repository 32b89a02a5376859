"""Models of other routers in virtual time: each chooses as its documentation states."""

from dataclasses import replace
from typing import Any

import pytest

from forebay.proxy.core.model import Reject, Request, Send
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.specs import LLAMA_3_8B
from forebay.replay.sim.routers.base import RouterModel
from forebay.replay.sim.routers.models import ROUTER_MODELS, LeastConnectionsQueue
from forebay.replay.sim.scenario import ALL_KNOWING, DIRECT, Scenario, simulate
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.synth.documents import SharedDocument, shared_document

WINDOWS = replace(LLAMA_3_8B, sliding_layers=16, sliding_window=1_024)
SPEC = SharedDocument(users=30, document_tokens=8_192, rate_per_s=5.0, arrivals="poisson")


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


def test_lmetric_multiplies_what_is_left_to_compute_by_the_batch() -> None:
    peer = started("lmetric")
    home = went(peer, "a", 0)
    for number in range(4):
        peer.first_token("a", 1.0)
        assert went(peer, f"b{number}", 0, blocks=21 + number) == home
        peer.first_token(f"b{number}", 1.0)
    # At home (29 - 24) x 512 tokens are left and it would be the 6th: elsewhere 29 x 512, the 1st.
    assert went(peer, "c", 0, blocks=29) != home


def test_lmetric_goes_to_the_smaller_batch_where_nothing_is_cached() -> None:
    peer = started("lmetric")
    peer.places[0].running = 3
    assert went(peer, "a", 0) == "gpu1"
    peer.first_token("a", 1.0)
    assert went(peer, "b", 1_000) == "gpu1"  # 2 x 10,240 against 4 x 10,240


def queued(peer: RouterModel, name: str, first: int, blocks: int) -> list[str]:
    """The requests that leave when one more comes."""
    request = Request(name, 512 * blocks, 10, tuple(range(first, first + blocks)))
    return [action.request.id for action in peer.arrive(request, 0.0)]


def test_dynamo_queues_share_by_uncached_tokens_once_every_engine_is_busy() -> None:
    peer = started("dynamo_queues", engines=1)
    assert queued(peer, "busy", 0, 257) == ["busy"]  # more than 16 x 8,192 tokens
    for number in range(30):
        assert queued(peer, f"short{number}", 10_000 * (number + 1), 4) == []  # 2,048 tokens
    for number in range(3):
        assert queued(peer, f"long{number}", 1_000_000 * (number + 1), 10) == []  # 5,120 tokens
    assert queued(peer, "shortest", 9_000_000, 1) == []
    left = [action.request.id for action in peer.first_token("busy", 1.0)]
    assert left[0] == "shortest"  # `wspt` in its class
    # A long one costs ten rounds of its class; each is 2,048 tokens, one request, of the other.
    assert [at for at, name in enumerate(left) if name.startswith("long")] == [10, 21, 32]


def test_dynamo_queues_reject_beyond_the_limit_of_a_class() -> None:
    peer = started("dynamo_queues", engines=1)
    queued(peer, "busy", 0, 257)
    for number in range(103):  # 103 x 10,240 tokens reach 1,048,576
        assert queued(peer, f"long{number}", 10_000 * (number + 1), 20) == []
    request = Request("more", 10_240, 10, tuple(range(5_000_000, 5_000_020)))
    (action,) = peer.arrive(request, 0.0)
    assert isinstance(action, Reject)


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
    rows = list(shared_document(SPEC))
    done = simulate(rows, Scenario(policy=policy))
    assert all(o.finished_s is not None for o in done.outcomes)
    again = simulate(rows, Scenario(policy=policy))
    assert [o.ttft_s for o in done.outcomes] == [o.ttft_s for o in again.outcomes]


def test_who_looks_into_the_engines_pays_for_a_document_once() -> None:
    rows = list(shared_document(SPEC))
    rows += [
        TraceRequest("cold", rows[-1].arrival_s + 9.0, 8_192, 8, tuple(range(10**6, 10**6 + 16)))
    ]
    done = simulate(rows, Scenario(policy=ALL_KNOWING))
    full = [o for o in done.outcomes if o.cached_tokens == 0]
    assert [o.request.id for o in full] == [rows[0].id, "cold"]


@pytest.mark.parametrize(
    ("scenario", "remedy"),
    [
        ({"exact": True}, "leave out --exact"),
        ({"engine": EngineConfig(WINDOWS)}, "add --disable-hybrid-kv-cache-manager"),
    ],
)
def test_who_looks_into_the_engines_needs_those_that_skip(
    scenario: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(InputError, match="--policy all_knowing: only for engines") as caught:
        Scenario(policy=ALL_KNOWING, **scenario)
    assert remedy in str(caught.value)
