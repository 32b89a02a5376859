"""The scheduler and the block pool, step by step, as vLLM 0.32 would do it."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.scheduler import Scheduled, Scheduler

BLOCK = 16


def scheduler(blocks: int = 1_000, **options: object) -> Scheduler:
    limits = SchedulerLimits(max_model_len=4_096, **options)  # type: ignore[arg-type]
    return Scheduler(limits, BlockPool(blocks))


def request(name: str, prompt: int, output: int = 4, text: str | None = None, **options: object):  # type: ignore[no-untyped-def]
    """A request whose prompt starts like every other one of the same `text`."""
    hashes = [hash((text or name, index)) for index in range(prompt // BLOCK)]
    return EngineRequest(name, prompt, output, hashes, **options)  # type: ignore[arg-type]


def step(engine: Scheduler) -> Scheduled:
    """Schedule and give every sampled request its token."""
    planned = engine.schedule()
    for one in planned.sampled:
        one.tokens += 1
    engine.finish([one for one in planned.sampled if one.output_tokens >= one.output_target])
    engine.pool.check()
    return planned


def counts(planned: Scheduled) -> dict[str, int]:
    return {one.id: count for one, count in planned.tokens.items()}


def run_dry(engine: Scheduler) -> None:
    while engine.running or engine.waiting:
        step(engine)


class TestBudget:
    def test_running_first_in_order_then_the_rest_of_the_budget(self) -> None:
        engine = scheduler(max_num_batched_tokens=100, max_num_seqs=16)
        for name, prompt in (("a", 30), ("b", 250), ("c", 10)):
            engine.add(request(name, prompt))
        assert counts(step(engine)) == {"a": 30, "b": 70}
        assert counts(step(engine)) == {"a": 1, "b": 99}
        assert counts(step(engine)) == {"a": 1, "b": 81, "c": 10}

    def test_a_middle_chunk_gives_no_token(self) -> None:
        engine = scheduler(max_num_batched_tokens=100, max_num_seqs=16)
        engine.add(request("a", 150))
        assert [len(step(engine).sampled) for _ in range(3)] == [0, 1, 1]

    def test_the_threshold_caps_only_in_company(self) -> None:
        engine = scheduler(
            max_num_batched_tokens=100, max_num_seqs=16, long_prefill_token_threshold=20
        )
        engine.add(request("a", 300))
        assert counts(step(engine)) == {"a": 100}
        engine.add(request("b", 50))
        assert counts(step(engine)) == {"a": 20, "b": 20}

    def test_up_to_0_29_the_threshold_caps_a_lone_request_too(self) -> None:
        engine = scheduler(long_prefill_token_threshold=20, cap_spares_lone_request=False)
        engine.add(request("a", 300))
        assert counts(step(engine)) == {"a": 20}

    def test_the_adaptive_threshold_is_at_least_a_fair_share(self) -> None:
        engine = scheduler(
            max_num_batched_tokens=100,
            max_num_seqs=16,
            long_prefill_token_threshold=20,
            long_prefill_token_threshold_adaptive=True,
        )
        for name in "abc":
            engine.add(request(name, 300))
        assert counts(step(engine)) == {"a": 33, "b": 33, "c": 33}

    def test_max_num_active_seqs_bounds_those_running(self) -> None:
        engine = scheduler(max_num_seqs=3, max_num_active_seqs=1)
        for name in "ab":
            engine.add(request(name, 10, 2))
        assert [list(counts(step(engine))) for _ in range(3)] == [["a"], ["a"], ["b"]]

    def test_max_num_seqs_keeps_the_others_waiting(self) -> None:
        engine = scheduler(max_num_seqs=2)
        for name in "abc":
            engine.add(request(name, 10, 3))
        assert [list(counts(step(engine))) for _ in range(4)] == [["a", "b"]] * 3 + [["c"]]

    def test_without_chunks_a_head_that_does_not_fit_stops_the_scan(self) -> None:
        engine = scheduler(max_num_batched_tokens=4_096, enable_chunked_prefill=False)
        for name, prompt in (("a", 3_000), ("b", 2_000), ("c", 10)):
            engine.add(request(name, prompt))
        assert list(counts(step(engine))) == ["a"]
        assert list(counts(step(engine))) == ["a", "b", "c"]

    def test_in_0_11_without_chunks_what_fits_overtakes_and_the_line_keeps_its_order(self) -> None:
        engine = scheduler(
            max_num_batched_tokens=4_096, enable_chunked_prefill=False, whole_prompts_overtake=True
        )
        for name, prompt in (("a", 3_000), ("b", 2_000), ("c", 2_100), ("d", 10)):
            engine.add(request(name, prompt))
        assert list(counts(step(engine))) == ["a", "d"]
        assert [one.id for one in engine.waiting] == ["b", "c"]


class TestPrefixCache:
    @pytest.mark.parametrize(
        ("prompt", "hit"), [(15, 0), (16, 0), (17, 16), (320, 304), (321, 320), (335, 320)]
    )
    def test_the_last_token_is_always_computed(self, prompt: int, hit: int) -> None:
        engine = scheduler()
        engine.add(request("a", prompt, 1, "same"))
        run_dry(engine)
        again = request("b", prompt, 1, "same")
        engine.add(again)
        assert counts(step(engine)) == {"b": prompt - hit}
        assert again.cached_tokens == hit
        assert (engine.prefix_queries, engine.prefix_hits) == (2 * prompt, hit)

    def test_blocks_can_be_hit_in_the_step_that_schedules_them(self) -> None:
        engine = scheduler()
        engine.add(request("a", 100, 1, "same"))
        engine.add(request("b", 100, 1, "same"))
        assert counts(step(engine)) == {"a": 100, "b": 4}

    def test_equal_prompts_in_flight_are_not_merged(self) -> None:
        engine = scheduler(max_num_batched_tokens=64, max_num_seqs=16)
        engine.add(request("a", 128, 1, "same"))
        engine.add(request("b", 128, 1, "same"))
        step(engine)
        step(engine)
        step(engine)  # b hit what was registered when it came in, and computes the rest
        assert engine.pool.cached_blocks == 8

    def test_output_blocks_are_hit_too(self) -> None:
        def words(before: int, index: int) -> int:
            return hash(("conversation", index))

        engine = scheduler()
        engine.add(request("a", 32, 40, "conversation", extend=words))
        run_dry(engine)
        follow_up = request("b", 100, 1, "conversation")
        engine.add(follow_up)
        step(engine)
        assert follow_up.cached_tokens == 64  # 71 tokens were computed: four whole blocks

    def test_off_means_off(self) -> None:
        engine = scheduler(enable_prefix_caching=False)
        for name in "ab":
            engine.add(request(name, 100, 1, "same"))
            run_dry(engine)
        assert engine.prefix_hits == 0
        assert engine.pool.cached_blocks == 0

    def test_a_head_that_waits_is_counted_once_or_up_to_0_26_at_every_look(self) -> None:
        for every, queries in ((False, 160 + 320), (True, 160 + 3 * 320)):
            engine = scheduler(blocks=1 + 21, counts_every_lookup=every)
            engine.add(request("a", 160, 2))
            engine.add(request("b", 320, 1))
            run_dry(engine)
            assert engine.prefix_queries == queries


class TestEviction:
    def test_a_partial_block_is_reused_first(self) -> None:
        engine = scheduler(blocks=100)
        one = request("a", 40, 1)
        engine.add(one)
        engine.schedule()
        first, second, third = one.blocks
        engine.remove(one)
        order = engine.pool.free_order()
        assert order[0] == third
        assert order[-2:] == [second, first]

    def test_up_to_0_23_a_partial_block_goes_to_the_back(self) -> None:
        engine = Scheduler(SchedulerLimits(4_096), BlockPool(100, uncached_first=False))
        one = request("a", 40, 1)
        engine.add(one)
        engine.schedule()
        blocks = list(one.blocks)
        engine.remove(one)
        assert engine.pool.free_order()[-3:] == blocks[::-1]


class TestMemory:
    def test_without_reserving_the_whole_prompt_its_first_chunk_is_enough(self) -> None:
        for reserve, second in ((True, ["a"]), (False, ["a", "b"])):
            engine = scheduler(
                blocks=1 + 20,
                max_num_batched_tokens=96,
                max_num_seqs=4,
                scheduler_reserve_full_isl=reserve,
            )
            engine.add(request("a", 64))
            engine.add(request("b", 17 * BLOCK))
            assert list(counts(step(engine))) == second

    def test_the_watermark_stays_free_while_somebody_runs(self) -> None:
        engine = scheduler(blocks=1 + 20, watermark=0.25)  # int(0.25 * 21) = 5 blocks
        engine.add(request("a", 18 * BLOCK, 1))
        assert list(counts(step(engine))) == ["a"]  # nobody runs: all blocks may go
        engine.add(request("b", 8 * BLOCK, 3))
        engine.add(request("c", 8 * BLOCK, 1))
        assert list(counts(step(engine))) == ["b"]
        engine.add(request("d", 7 * BLOCK, 1))
        assert list(counts(step(engine))) == ["b"]  # 9 + 8 + 5 > 20; d does not overtake c

    def test_a_head_that_does_not_fit_blocks_the_line(self) -> None:
        engine = scheduler(blocks=1 + 20)
        engine.add(request("a", 15 * BLOCK, 3))
        engine.add(request("b", 10 * BLOCK, 1))
        engine.add(request("c", 1, 1))
        assert list(counts(step(engine))) == ["a"]
        assert list(counts(step(engine))) == ["a"]  # c would fit, but nobody overtakes
        step(engine)
        assert list(counts(step(engine))) == ["b", "c"]

    def test_the_last_in_loses_its_blocks_and_goes_first_in_line(self) -> None:
        engine = scheduler(blocks=1 + 4)
        first, second = request("a", 31, 30), request("b", 31, 30)
        engine.add(first)
        engine.add(second)
        engine.add(request("c", 16, 1))
        assert list(counts(step(engine))) == ["a", "b"]
        step(engine)
        planned = step(engine)  # both need a third block; none is free
        assert counts(planned) == {"a": 1}
        assert planned.preempted == [second]
        head = engine.waiting.head()
        assert head is not None
        assert head.id == "b"
        assert second.computed == 0
        run_dry(engine)
        assert second.output_tokens == 30
        assert second.preemptions >= 1

    def test_a_preempted_request_finds_its_own_blocks(self) -> None:
        engine = scheduler(blocks=1 + 40)
        engine.add(request("a", 16 * 16, 20))
        late = request("b", 16 * 16, 300)
        engine.add(late)
        while not late.preemptions:
            step(engine)
            if len(engine.running) == 1:
                break
        run_dry(engine)
        assert late.output_tokens == 300

    def test_priority_picks_the_worst(self) -> None:
        engine = scheduler(blocks=1 + 4, scheduling_policy="priority")
        worst = request("a", 31, 30, priority=9, arrival_s=0.0)
        best = request("b", 31, 30, priority=1, arrival_s=1.0)
        engine.add(worst)
        engine.add(best)
        assert list(counts(step(engine))) == ["b", "a"]
        step(engine)
        assert step(engine).preempted == [worst]

    def test_a_step_that_preempts_admits_nobody(self) -> None:
        engine = scheduler(blocks=1 + 4, scheduling_policy="priority", max_num_seqs=2)
        for name, priority in (("a", 1), ("b", 9)):
            engine.add(request(name, 31, 30, priority=priority))
        step(engine)
        engine.add(request("c", 4, 1, priority=0))  # waits for a seat, not for memory
        step(engine)
        assert list(counts(step(engine))) == ["a"]
        assert list(counts(step(engine))) == ["a", "c"]

    def test_priority_orders_the_line(self) -> None:
        engine = scheduler(max_num_seqs=1, scheduling_policy="priority")
        for name, priority in (("low", 10), ("mid", 5), ("high", -5), ("high2", -5)):
            engine.add(request(name, 10, 1, priority=priority))
        assert [next(iter(counts(step(engine)))) for _ in range(4)] == [
            *("high", "high2", "mid", "low")
        ]


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    blocks=st.integers(30, 90),
    budget=st.sampled_from([16, 40, 100, 512]),
    seats=st.sampled_from([1, 3, 16]),
    policy=st.sampled_from(["fcfs", "priority"]),
    threshold=st.sampled_from([0, 24]),
    caching=st.booleans(),
)
def test_every_request_ends_with_its_tokens_and_the_pool_empty(
    seed: int,
    blocks: int,
    budget: int,
    seats: int,
    policy: str,
    threshold: int,
    caching: bool,
) -> None:
    rng = random.Random(seed)
    limits = SchedulerLimits(
        max_model_len=400,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        scheduling_policy=policy,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=caching,
    )
    engine = Scheduler(limits, BlockPool(blocks))
    alive: dict[str, EngineRequest] = {}
    tokens: Counter[str] = Counter()
    wanted = {}
    for index in range(400):
        if index < 40 and rng.random() < 0.7:
            name = f"{index:03}"
            one = request(
                name,
                rng.randint(1, 360),
                rng.randint(1, 40),
                rng.choice("xyz"),
                priority=rng.randint(0, 2),
                arrival_s=float(index),
            )
            alive[name], wanted[name] = one, one.output_target
            engine.add(one)
        if alive and rng.random() < 0.01:
            gone = alive.pop(rng.choice(sorted(alive)))
            engine.remove(gone)
            del wanted[gone.id]
        if not alive:
            continue
        planned = engine.schedule()
        assert planned.tokens or planned.preempted, "work, and nothing scheduled"
        assert sum(planned.tokens.values()) <= budget
        assert len(engine.running) <= seats
        held = sum(-(-one.computed // BLOCK) for one in engine.running)
        assert held <= sum(len(one.blocks) for one in engine.running) <= held + len(engine.running)
        if policy == "fcfs" and not planned.preempted and len(engine.waiting):
            arrivals = [one.arrival_s for one in engine.waiting]
            assert all(early <= late for early, late in pairwise(arrivals))
        for one in engine.running:
            registered = [engine.pool.hash_of(block) for block in one.blocks[: one.registered]]
            assert registered == one.hashes[: one.registered]
        assert all(one.computed == one.tokens for one in planned.sampled)
        done = []
        for one in planned.sampled:
            one.tokens += 1
            tokens[one.id] += 1
            if one.output_tokens == one.output_target:
                done.append(one)
        engine.finish(done)
        for one in done:
            del alive[one.id]
        engine.pool.check()
    while alive:
        for one in list(step(engine).sampled):
            tokens[one.id] += 1
            if one.output_tokens == one.output_target:
                del alive[one.id]
    assert {name: tokens[name] for name in wanted} == wanted
    assert engine.pool.usage == 0
    assert not engine.running
    assert not len(engine.waiting)
