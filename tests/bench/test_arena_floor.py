"""The floor of TTFT, against hand-made traces and against routers."""

from pathlib import Path

import pytest
from arena_floor import floor_s, prefill_on
from arena_workloads import ENGINE, ENGINES, at_load, popular

from forebay.replay.sim.scenario import Scenario, simulate
from forebay.traces.schema import TraceRequest

LINE_S = 0.001  # between two lengths that an engine was asked, a straight line


def alone(tokens: float) -> float:
    return tokens / 1_000


def asked(at: float, *blocks: int, tokens: int = 0) -> TraceRequest:
    tokens = tokens or 1_000 * len(blocks)
    return TraceRequest(str(at), at, tokens, 1, blocks=blocks, block_tokens=1_000)


def test_who_shares_nothing_takes_its_own_prefill_however_many_there_are() -> None:
    rows = [asked(0.0, 1, 2), asked(0.0, 3, 4, 5), TraceRequest("no blocks", 0.1, 4_000, 1)]
    assert floor_s(rows, alone).tolist() == pytest.approx([2.0, 3.0, 4.0])


def test_who_asks_about_the_same_waits_for_the_first_or_hits() -> None:
    rows = [asked(0.0, 1, 2), asked(0.5, 1, 2, 3), asked(9.0, 1, 2, tokens=2_000)]
    # There until 2.0, then a block of its own; 9.0: all but the last token is cached.
    assert floor_s(rows, alone).tolist() == pytest.approx([2.0, 2.5, 0.001])


def test_who_would_wait_longer_than_its_own_prefill_takes_computes() -> None:
    rows = [asked(0.0, *range(10)), asked(0.0, 0, 1)]
    assert floor_s(rows, alone).tolist() == pytest.approx([10.0, 2.0])
    # Of a long prefill that is under way the beginning is there sooner than its end.
    assert floor_s([rows[0], asked(1.9, 0, 1, 2, 3)], alone)[1] == pytest.approx(2.1)


@pytest.mark.parametrize("policy", ["warm_or_least_work", "cache_aware", "direct", "all_knowing"])
def test_no_router_undercuts_it(policy: str) -> None:
    """One that does would show that it is no floor."""
    rows = at_load(popular(0.5)(3, Path())[:400], 0.8)
    played = simulate(rows, Scenario(engine=ENGINE, gpus=ENGINES, policy=policy))
    took = [outcome.ttft_s for outcome in played.outcomes]
    least = floor_s(rows, prefill_on(ENGINE)).tolist()
    served = [(t, f) for t, f in zip(took, least, strict=True) if t is not None]
    assert len(served) > 350
    assert all(ttft_s >= floor - LINE_S for ttft_s, floor in served)
    assert sorted(t for t, _ in served)[-1] > sorted(f for _, f in served)[-1]
