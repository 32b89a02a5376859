"""The bound of what any scheduler serves in time: planted optima, brute force, real schedulers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overload import mix, poisson

from forebay.replay.engine.config import EngineConfig
from forebay.replay.plan.slo import parse_slos
from forebay.replay.sim.routers.possible import Floats, LeastPrefill, densest, fitting, most_in_time
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.replay.sim.summary import summarise
from forebay.replay.sim.sweep import cases, parse_axes, run_all, run_case
from forebay.replay.sim.table import results_table
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.ground.schema import TraceRequest

ENGINE = EngineConfig()
Job = tuple[float, float, float]  # release, deadline, work, seconds


def served(jobs: Sequence[Job], engines: float = 1.0) -> list[float]:
    release, deadline, work = (np.array(column, dtype=float) for column in zip(*jobs, strict=True))
    return [float(part) for part in fitting(release, deadline, work, engines)]


def fits(jobs: Sequence[Job], speed: float) -> bool:
    """Run the earliest deadline first, with preemption; tell whether none is late."""
    left = [work / speed for _, _, work in jobs]
    times = sorted({release for release, _, _ in jobs})
    for now, until in zip(times, [*times[1:], inf], strict=True):
        while now < until:
            open_ = [i for i, job in enumerate(jobs) if job[0] <= now and left[i] > 1e-9]
            if not open_:
                break
            first = min(open_, key=lambda i: jobs[i][1])
            spent = min(left[first], until - now)
            now += spent
            left[first] -= spent
            if left[first] <= 1e-9 and now > jobs[first][1] + 1e-6:
                return False
    return True


def best_of_all_subsets(jobs: Sequence[Job], speed: float) -> int:
    for count in range(len(jobs), 0, -1):
        if any(fits(chosen, speed) for chosen in combinations(jobs, count)):
            return count
    return 0


@pytest.mark.parametrize(
    ("jobs", "engines", "parts"),
    [
        ([(0, 2, 1), (0, 2, 1), (0, 2, 1)], 1, 2.0),  # two of three
        ([(0, 2, 1), (0, 2, 1), (0, 2, 1)], 2, 3.0),  # a second engine takes the third
        ([(0, 10, 10), (4, 5, 1), (8, 9, 1)], 1, 2.8),  # two chats leave the document 8 of 10 s
        ([(0, 10, 8), (4, 5, 1), (8, 9, 1)], 1, 3.0),  # it is interrupted twice
        ([(0, 1, 1), (5, 6, 1), (5, 6, 1)], 1, 2.0),  # idle time before does not help
    ],
)
def test_planted_optima(jobs: list[Job], engines: int, parts: float) -> None:
    assert sum(served(jobs, engines)) == pytest.approx(parts)


JOBS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(1, 6)).map(
        lambda drawn: (float(drawn[0]), float(drawn[0] + drawn[1]), float(drawn[2]))
    ),
    min_size=1,
    max_size=7,
)


@settings(deadline=None)
@given(JOBS, st.sampled_from([1.0, 2.0]))
def test_no_subset_that_fits_is_larger_and_what_is_counted_fits(
    jobs: list[Job], speed: float
) -> None:
    parts = served(jobs, speed)
    assert best_of_all_subsets(jobs, speed) <= sum(parts) + 1e-6
    counted = [(*job[:2], job[2] * part) for job, part in zip(jobs, parts, strict=True)]
    assert fits([job for job in counted if job[2] > 0], speed)


@settings(deadline=None)
@given(JOBS)
def test_with_unit_work_and_whole_seconds_the_bound_is_the_optimum(jobs: list[Job]) -> None:
    """A loose bound would pass the test above; here the program has a whole solution."""
    unit = [(release, deadline, 1.0) for release, deadline, _ in jobs]
    assert sum(served(unit)) == pytest.approx(best_of_all_subsets(unit, 1.0))


def test_coarse_times_only_raise_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = np.random.default_rng(0)
    release = dice.uniform(0, 100, 300)
    jobs = release, release + dice.choice([2.0, 30.0], 300), dice.uniform(0.1, 1.5, 300)
    exact = fitting(*jobs, 1).sum()
    monkeypatch.setattr("forebay.replay.sim.routers.possible.CELLS", 300 * 60**2)
    assert exact <= fitting(*jobs, 1).sum() < 1.15 * exact


def test_what_fits_is_found_by_sums_and_by_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums decide only where there is time left, and agree with the visits there."""
    dice = np.random.default_rng(3)
    release = dice.uniform(0, 100, 300)
    for most_s in (0.05, 0.2, 0.5, 1.5):
        jobs = release, release + dice.choice([2.0, 30.0], 300), dice.uniform(0.01, most_s, 300)
        found = fitting(*jobs, 1)
        monkeypatch.setattr("forebay.replay.sim.routers.possible.ROUNDING_S", inf)
        assert found.tolist() == fitting(*jobs, 1).tolist()
        monkeypatch.undo()
        assert (found == 1.0).all() == (most_s < 1.0)


def test_a_prompt_constrains_by_its_densest_end() -> None:
    assert densest([(0.0, 1.0), (9.0, 4.0), (10.0, 1.0)], 12.0) == (9.0, 5.0)
    assert densest([(0.0, 1.0)], 12.0) == (0.0, 1.0)


def test_a_shared_prefix_is_paid_once_and_not_before_its_first_request() -> None:
    least = LeastPrefill(ENGINE)
    cost = least.seconds(0, 64 * 512) + least.server_s(64 * 512)
    rows = [
        TraceRequest(str(n), 0.0, 64 * 512, 1, tuple(range(64)), document="one") for n in range(9)
    ]
    limit_s = cost + 0.05
    assert most_in_time(rows, [limit_s] * 9, ENGINE, 1).sum() == pytest.approx(9.0)
    apart = [replace(r, blocks=tuple(range(1_000 * n, 1_000 * n + 64))) for n, r in enumerate(rows)]
    assert most_in_time(apart, [limit_s] * 9, ENGINE, 1).sum() == pytest.approx(1.0, abs=0.1)
    assert most_in_time(apart, [limit_s] * 9, ENGINE, 9).sum() == pytest.approx(9.0)


def test_what_takes_too_long_alone_counts_as_nothing_and_what_has_no_target_as_one() -> None:
    rows = [TraceRequest(str(n), float(n), 60_000, 1) for n in range(3)]
    assert most_in_time(rows, [1.0, inf, 20.0], ENGINE, 8).tolist() == [0.0, 1.0, 1.0]


@cache
def bound_at(rate_per_s: float) -> tuple[list[TraceRequest], list[float], float]:
    """Return requests, their targets, and how many of them could be in time on two engines."""
    rows = poisson(mix, [(30.0, rate_per_s)], 0)
    limits_s = [2.0 if row.input_tokens <= 5_000 else 30.0 for row in rows]
    return rows, limits_s, float(most_in_time(rows, limits_s, ENGINE, 2).sum())


@pytest.mark.parametrize("policy", ["warm_or_least_work", "llm_d", "leastconn_8", "all_knowing"])
@pytest.mark.parametrize("threshold", [0, 2_048])
def test_no_scheduler_serves_more(policy: str, threshold: int) -> None:
    """One that does would show that it is no bound."""
    engine = replace(ENGINE, long_prefill_token_threshold=threshold)
    for rate_per_s in (20.0, 45.0):
        rows, limits_s, most = bound_at(rate_per_s)
        outcomes = simulate(rows, Scenario(engine, policy=policy)).outcomes
        took = [inf if o.ttft_s is None else o.ttft_s for o in outcomes]
        good = sum(ttft_s <= limit_s for ttft_s, limit_s in zip(took, limits_s, strict=True))
        assert good <= most <= len(rows)


def test_the_summary_of_an_overload_states_the_share_of_the_possible() -> None:
    rows = poisson(mix, [(30.0, 45.0)], 0)
    overloaded = summarise(simulate(rows, Scenario(ENGINE)), parse_slos("ttft=2s", ()), 30.0)
    assert overloaded["attainment"] < 0.9 * overloaded["share_of_possible"] < 0.9
    possible = overloaded["goodput_per_s"] / overloaded["share_of_possible"]
    assert overloaded["possible_goodput_per_s"] == pytest.approx(possible)
    shown = f"{100 * overloaded['share_of_possible']:.1f}% of the most"
    assert shown in str(results_table([{"case": {}, **overloaded}]).caption)
    calm = summarise(simulate(rows[:20], Scenario(ENGINE)), parse_slos("ttft=9s", ()), 1.0)
    assert calm["share_of_possible"] == calm["attainment"] == 1.0


def test_a_prefill_costs_no_more_than_the_engine_takes() -> None:
    """An idle engine is as good as it gets for one prompt; the bound comes within a tenth of it."""
    for tokens in (8_192, 65_536, 120_000):
        alone = simulate([TraceRequest("one", 0.0, tokens, 1)], Scenario(ENGINE, gpus=1))
        took_s = alone.outcomes[0].ttft_s
        assert took_s is not None
        cost = LeastPrefill(ENGINE)
        assert 0.85 * took_s < cost.seconds(0, tokens) + cost.server_s(tokens) <= took_s


def test_a_sweep_computes_the_bound_once_for_all_policies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, slos = poisson(mix, [(10.0, 45.0)], 0), parse_slos("ttft=2s", ())
    axes = parse_axes(["policy=direct,warm_or_least_work,leastconn_8", "gpus=1,2,40"])
    listed = list(cases(axes, Scenario(ENGINE), SimWorkload(rows), slos))
    alone = [run_case(case) for case in listed]
    computed: list[int] = []

    def counting(
        rows: Sequence[TraceRequest], limits_s: Sequence[float], engine: EngineConfig, engines: int
    ) -> Floats:
        computed.append(engines)
        return most_in_time(rows, limits_s, engine, engines)

    monkeypatch.setattr("forebay.replay.sim.summary.most_in_time", counting)
    for result in alone:
        del result["cpu_s"]
    for jobs in (1, 2):
        computed.clear()
        together = list(run_all(listed, jobs))
        for result in together:
            del result["cpu_s"]
        assert together == alone
        assert [list(result) for result in together] == [list(result) for result in alone]
        # Of 40 engines all requests are in time. Two jobs are other processes, not counted here.
        assert computed == ([1, 2] if jobs == 1 else [])
