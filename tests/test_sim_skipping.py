"""The skipping engine against `EngineCore` stepped exactly: same workload, same timestamps."""

import random
from dataclasses import dataclass, field
from math import inf

import pytest

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.request import Request
from forebay.replay.engine.step_time import StepTimeModel, StepWork
from forebay.replay.engine.tokenizer import hashes_of_ids
from forebay.replay.sim.skipping import SimRequest, SkippingEngine

TOLERANCE_S = 1e-8


@dataclass
class Asked:
    at: float
    prompt: int
    output: int
    ids: tuple[int, ...] = ()
    block_tokens: int = 512


@dataclass
class Got:
    """What an engine made of a request."""

    first_token_s: float = -1.0
    finished_s: float = -1.0
    stall_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass
class Totals:
    steps: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    busy_s: float
    got: list[Got] = field(default_factory=list)


def stepped(config: EngineConfig, workload: list[Asked]) -> Totals:
    """Every step made; what arrives as a step ends takes part in the next one."""
    core, got = EngineCore(config), [Got() for _ in workload]
    block_size, at, end = core.limits.block_size, 0, inf
    while at < len(workload) or core.has_work:
        now = min(end, workload[at].at if at < len(workload) else inf)
        while at < len(workload) and workload[at].at == now:
            one = workload[at]
            hashes = hashes_of_ids(one.ids, one.block_tokens, one.prompt, block_size)
            core.add(Request(f"r{at}", one.prompt, one.output, hashes, sink=got[at]))
            at += 1
        if end == now:
            end = inf
            result = core.finish_step()
            for request in result.outputs:
                mine = request.sink
                if request.output_tokens == 1:
                    mine.first_token_s = now
                else:
                    mine.stall_s = max(mine.stall_s, now - request.last_token_s)
                request.last_token_s = now
            for request in result.finished:
                mine = request.sink
                mine.finished_s = now
                mine.cached_tokens, mine.preemptions = request.cached_tokens, request.preemptions
        if end == inf and core.has_work:
            end = now + core.start_step(now)
    scheduler = core.scheduler
    return Totals(
        core.steps,
        scheduler.preemptions,
        scheduler.prefix_queries,
        scheduler.prefix_hits,
        core.busy_s,
        got,
    )


def skipped(config: EngineConfig, workload: list[Asked]) -> Totals:
    engine = SkippingEngine(config)
    requests = [
        SimRequest(f"r{i}", one.prompt, one.output, one.ids, one.block_tokens)
        for i, one in enumerate(workload)
    ]
    at, firsts, ends = 0, [], []
    while at < len(workload) or engine.next_at() < inf:
        now = min(engine.next_at(), workload[at].at if at < len(workload) else inf)
        while at < len(workload) and workload[at].at == now:
            engine.add(requests[at], now)
            at += 1
            assert engine.next_at() >= now
        if engine.next_at() == now:
            first, finished = engine.advance(now)
            assert all(one.first_token_s == now for one in first)
            assert all(one.finished_s == now for one in finished)
            firsts += first
            ends += finished
    # Each is reported once.
    assert len(firsts) == len(ends) == len(set(firsts)) == len(set(ends)) == len(workload)
    assert engine.running == engine.waiting == 0
    check_pool(engine)
    return Totals(
        engine.steps,
        engine.preemptions,
        engine.prefix_queries,
        engine.prefix_hits,
        engine.busy_s,
        [
            Got(one.first_token_s, one.finished_s, one.stall_s, one.cached_tokens, one.preemptions)
            for one in requests
        ],
    )


def check_pool(engine: SkippingEngine) -> None:
    """All blocks are back, and the ring and the tree agree."""
    pool = engine._books.pool
    pool.settle()
    assert pool.free == engine._books.pool_blocks
    in_ring, run = pool._blank, pool._ring.after
    while run is not pool._ring:
        assert run.holders == 0
        assert run.after.before is run
        if run.node is not None:
            assert (run.start, run.stop) == (run.node.start, run.node.stop)
            assert run in run.node.copies
        in_ring += run.stop - run.start
        run = run.after
    assert in_ring == pool.free


def compare(config: EngineConfig, workload: list[Asked]) -> tuple[float, Totals]:
    """The largest difference of any time; fails where it is more than rounding."""
    exact, fast = stepped(config, workload), skipped(config, workload)
    assert (fast.steps, fast.preemptions) == (exact.steps, exact.preemptions)
    assert (fast.prefix_queries, fast.prefix_hits) == (exact.prefix_queries, exact.prefix_hits)
    largest = abs(fast.busy_s - exact.busy_s)
    for theirs, mine in zip(exact.got, fast.got, strict=True):
        assert mine.cached_tokens == theirs.cached_tokens
        assert mine.preemptions == theirs.preemptions
        largest = max(
            largest,
            abs(mine.first_token_s - theirs.first_token_s),
            abs(mine.finished_s - theirs.finished_s),
            abs(mine.stall_s - theirs.stall_s),
        )
    assert largest <= TOLERANCE_S
    return largest, exact


def random_config(rng: random.Random) -> EngineConfig:
    block_size = rng.choice([8, 8, 16, 32])
    context = rng.choice([24, 40, 64, 100, 200, 400])
    chunked = rng.random() < 0.8
    seqs = rng.choice([1, 2, 3, 5, 8, 30])
    budget = seqs + rng.choice([0, 1, 3, 8, 20, 60, 200])
    if not chunked:
        budget = max(budget, context + rng.choice([0, 5, 40]))
    blocks = -(-context // block_size) + 1 + rng.choice([0, 1, 2, 4, 10, 30, 100])
    return EngineConfig(
        max_model_len=context,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=rng.random() < 0.85,
        long_prefill_token_threshold=rng.choice([0, 0, 1, 4, 10, 30]),
        num_gpu_blocks_override=blocks,
    )


def random_workload(rng: random.Random, config: EngineConfig, tick: float = 0.0) -> list[Asked]:
    """Shared prefixes, equal prompts, whole and partial last blocks, bursts; `tick`: times are
    multiples of it."""
    context, block_size = config.context, config.block_size
    block_tokens = block_size * rng.choice([1, 1, 2, 3])
    spread = rng.choice([0.0, 0.01, 0.03, 0.1, 0.5])
    longest = rng.choice([4, 12, 40, context])
    alphabet = rng.choice([1, 2, 3])
    now, workload = rng.random(), []
    for number in range(rng.choice([3, 8, 20, 45])):
        if workload and rng.random() < 0.15:
            before = rng.choice(workload)
            prompt, ids = before.prompt, before.ids
        else:
            prompt = rng.randint(1, context - 1)
            if rng.random() < 0.3:
                prompt = min(context - 1, max(1, prompt // block_size) * block_size)
            shared = rng.randint(0, -(-prompt // block_tokens))
            ids = tuple(rng.randrange(alphabet) for _ in range(shared))
            if rng.random() < 0.7:
                own = -(-prompt // block_tokens) - shared
                ids += tuple(1000 + 100 * number + i for i in range(own))
        if rng.random() > 0.3:
            now += rng.expovariate(1) * spread
        if tick:
            now = round(now / tick) * tick
        output = rng.choice([1, 2, rng.randint(1, longest), rng.randint(1, longest)])
        workload.append(Asked(now, prompt, output, ids, block_tokens))
    return workload


@pytest.mark.parametrize("batch", range(8))
def test_random_workloads(batch: int) -> None:
    for seed in range(batch * 50, batch * 50 + 50):
        rng = random.Random(seed)
        config = random_config(rng)
        compare(config, random_workload(rng, config))
