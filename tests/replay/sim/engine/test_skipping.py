"""The skipping engine against `EngineCore` stepped exactly: same workload, same timestamps."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.kv_models import CONFIGS, write_config

from forebay.replay.engine import config as config_module
from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.hardware.find import find_model
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.step_time import StepWork
from forebay.replay.engine.tokenizer import hashes_of_ids
from forebay.replay.sim.engine.planning import UNLIMITED
from forebay.replay.sim.engine.served import can_skip
from forebay.replay.sim.engine.several_groups import KvDecides
from forebay.replay.sim.engine.skipping import SimRequest, SkippingEngine
from forebay.replay.sim.scenario import Scenario, simulate
from forebay.traces.ground.schema import TraceRequest

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
    """Times and cache hits of one request on an engine."""

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
    core, got = new_core(config), [Got() for _ in workload]
    block_size, at, end = core.limits.block_size, 0, inf
    while at < len(workload) or core.has_work:
        now = min(end, workload[at].at if at < len(workload) else inf)
        while at < len(workload) and workload[at].at == now:
            one = workload[at]
            hashes = hashes_of_ids(one.ids, one.block_tokens, one.prompt, block_size)
            core.add(
                EngineRequest(f"r{at}", one.prompt, one.output, hashes, arrival_s=now, sink=got[at])
            )
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
    fast = SkippingEngine(config)
    requests = [
        SimRequest(f"r{i}", one.prompt, one.output, one.ids, one.block_tokens)
        for i, one in enumerate(workload)
    ]
    at = 0
    firsts: list[SimRequest] = []
    ends: list[SimRequest] = []
    while at < len(workload) or fast.next_at() < inf:
        now = min(fast.next_at(), workload[at].at if at < len(workload) else inf)
        while at < len(workload) and workload[at].at == now:
            fast.add(requests[at], now)
            at += 1
            assert fast.next_at() >= now
        if fast.next_at() == now:
            first, finished = fast.advance(now)
            assert all(one.first_token_s == now for one in first)
            assert all(one.finished_s == now for one in finished)
            firsts += first
            ends += finished
    # Each is reported once.
    assert len(firsts) == len(ends) == len(set(firsts)) == len(set(ends)) == len(workload)
    assert fast.running == fast.waiting == 0
    check_pool(fast)
    return Totals(
        fast.steps,
        fast.preemptions,
        fast.prefix_queries,
        fast.prefix_hits,
        fast.busy_s,
        [
            Got(one.first_token_s, one.finished_s, one.stall_s, one.cached_tokens, one.preemptions)
            for one in requests
        ],
    )


def check_pool(fast: SkippingEngine) -> None:
    """All blocks are back, and the ring and the tree agree."""
    pool = fast._planner.pool
    pool.settle()
    several = fast._planner.groups is not None
    assert pool.free == (UNLIMITED - 1 if several else fast._planner.pool_blocks)
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
        async_scheduling=rng.random() < 0.5,
        # Not drawn: the seeds below stand for workloads. 0.32 takes an interval and ignores it.
        vllm_version="0.32" if blocks % 2 else "0.33",
        prefill_schedule_interval=1 + seqs % 4 if blocks % 2 else 1,
    )


def random_workload(rng: random.Random, config: EngineConfig, tick: float = 0.0) -> list[Asked]:
    """Shared prefixes, equal prompts, whole and partial last blocks, bursts; `tick`: times are
    multiples of it."""
    context, block_size = config.context, config.block_size
    block_tokens = block_size * rng.choice([1, 1, 2, 3])
    spread = rng.choice([0.0, 0.01, 0.03, 0.1, 0.5])
    longest = rng.choice([4, 12, 40, context])
    alphabet = rng.choice([1, 2, 3])
    now = rng.random()
    workload: list[Asked] = []
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


def scheduled_by_forebay(config: EngineConfig, rng: random.Random) -> EngineConfig:
    """The options with Forebay's scheduler and a pause of a few steps."""
    pause_s = rng.choice([0.001, 0.006, 0.008, 0.01, 0.02])
    return replace(
        config, scheduler_cls="forebay", additional_config=f'{{"forebay": {{"pause": {pause_s}}}}}',
        enable_chunked_prefill=True, prefill_schedule_interval=1,
    )  # fmt: skip


@pytest.mark.parametrize("batch", range(8))
def test_random_workloads_with_forebays_scheduler(batch: int) -> None:
    preempted = 0
    for seed in range(batch * 50, batch * 50 + 50):
        rng = random.Random(seed)
        config = random_config(rng)
        workload = random_workload(rng, config)
        _, totals = compare(scheduled_by_forebay(config, rng), workload)
        preempted += totals.preemptions
    assert preempted > 10


@pytest.mark.parametrize(
    "seed",
    [
        # The request that finds no block is itself the last of RUNNING, and is preempted.
        *(706, 2848),
        # One ends with the prefill it completes, another by decoding, in one step.
        *(3762, 5599),
    ],
)
def test_workloads_that_found_rare_errors(seed: int) -> None:
    rng = random.Random(seed)
    config = random_config(rng)
    compare(config, random_workload(rng, config))


def sliding_model(folder: Path, window: int) -> str:
    """Return the folder of a Gemma-3 with a window of so many tokens."""
    config = CONFIGS["google/gemma-3-27b-it"]
    text = {**config["text_config"], "sliding_window": window}
    return str(write_config(folder / str(window), config, text_config=text))


def whole_context(config: EngineConfig, model: str) -> EngineConfig:
    """The same options for a model all of whose layers keep the whole context."""
    return replace(config, model=model, disable_hybrid_kv_cache_manager=True)


def test_sliding_windows_at_random(tmp_path: Path) -> None:
    outgrown = 0
    for seed in range(150):
        rng = random.Random(f"windows {seed}")
        window = rng.choice([1, 2, 5, 16, 33, 64, 100, 300])
        config = whole_context(random_config(rng), sliding_model(tmp_path, window))
        assert can_skip(config)
        workload = random_workload(rng, config)
        compare(config, workload)
        outgrown += sum(one.prompt < window < one.prompt + one.output for one in workload)
    assert outgrown > 100


def test_sliding_windows_at_full_size(tmp_path: Path) -> None:
    rng, now, workload = random.Random("sliding"), 0.0, []
    for number in range(80):
        now += rng.expovariate(8.0)
        prompt = 40_000 if number % 10 == 0 else rng.randint(200, 1_500)
        ids = tuple(range(1_000 * number, 1_000 * number + 3))
        workload.append(Asked(now, prompt, rng.randint(1, 900), ids))
    for blocks in (None, 2_850):  # the second preempts
        config = EngineConfig(
            sliding_model(tmp_path, 1_024), "h200", max_model_len=45_000,
            num_gpu_blocks_override=blocks, disable_hybrid_kv_cache_manager=True,
        )  # fmt: skip
        _, totals = compare(config, workload)
    assert totals.preemptions > 0


def test_several_groups_of_layers_at_random(tmp_path: Path) -> None:
    """Equal times, or `KvDecides`: prompts that share nothing, in memory that may be short."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        rng = random.Random(f"groups {seed}")
        drawn = replace(random_config(rng), num_gpu_blocks_override=100_000)
        config = replace(drawn, model=sliding_model(tmp_path, rng.choice([2, 16, 33, 100])))
        assert not can_skip(config)
        assert can_skip(config, hopeful=True)
        needed = 1 + config.kv_budget.layout.request_blocks(config.context)
        config = replace(config, num_gpu_blocks_override=needed * rng.choice([1, 2, 20]))
        workload = [replace(one, ids=()) for one in random_workload(rng, config)]
        try:
            compare(config, workload)
            seen["skipped"] += 1
        except KvDecides:
            seen["decided"] += 1
    assert min(seen["skipped"], seen["decided"]) > 30, seen


def test_a_shared_prefix_of_several_groups_is_not_skipped(tmp_path: Path) -> None:
    config = EngineConfig(sliding_model(tmp_path, 1_024), "h200", max_model_len=45_000)
    ids = tuple(range(10))
    with pytest.raises(KvDecides):
        skipped(config, [Asked(0.0, 6_000, 5, ids), Asked(1.0, 6_000, 5, ids)])


def test_a_simulation_of_several_groups_is_that_of_every_step(tmp_path: Path) -> None:
    model = sliding_model(tmp_path, 1_024)
    for shared in (False, True):
        trace = [
            TraceRequest(str(number), float(number), 6_000, 5, (0 if shared else number, 1))
            for number in range(6)
        ]
        engine = EngineConfig(model, "h200", max_model_len=45_000)
        mine, exact = (simulate(trace, Scenario(engine, 1, exact=exact)) for exact in (False, True))
        for one, other in zip(mine.outcomes, exact.outcomes, strict=True):
            assert one.finished_s == pytest.approx(other.finished_s, abs=TOLERANCE_S)
            assert one.cached_tokens == other.cached_tokens
        assert any(one.cached_tokens for one in mine.outcomes) == shared


TICK_S = 2.0**-12


class Ticking:
    """A step-time model without rounding: every step takes whole ticks."""

    calibration = SimpleNamespace(step_s=3 * TICK_S)
    window_s = 3 * TICK_S

    def __init__(self, context_s: float) -> None:
        self.context_s = context_s

    def step_s(self, work: StepWork) -> float:
        prefill_tokens = sum(count for count, _ in work.chunks)
        fixed_s = TICK_S * (1 + work.sequences // 4 + prefill_tokens // 64)
        attention_s = self.context_s * work.decode_context + self.window_s * work.window_context
        return fixed_s + attention_s

    def admit_s(self, prompt_tokens: int) -> float:
        return TICK_S if prompt_tokens > 100 else 0.0

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        return self.step_s(StepWork(sequences=sequences)), self.context_s


@pytest.mark.parametrize("context_s", [0.0, TICK_S])
def test_arrivals_at_the_end_of_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, context_s: float
) -> None:
    monkeypatch.setattr(config_module, "step_time_model", lambda *_: Ticking(context_s))
    for seed in range(60):
        rng = random.Random(f"ticks {seed}")
        config = random_config(rng)
        for model in ("llama-3-8b", sliding_model(tmp_path, rng.randint(1, 60))):
            sized = whole_context(config, model)
            difference, _ = compare(sized, random_workload(rng, sized, TICK_S))
            assert difference == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 2_048, "long_prefill_token_threshold": 512},
        {"num_gpu_blocks_override": 8_800},  # one document at a time
        {"scheduler_cls": "forebay"},
        {"scheduler_cls": "forebay", "num_gpu_blocks_override": 8_800},
        {"scheduler_cls": "forebay", "async_scheduling": False},
        {"scheduler_cls": "forebay", "long_prefill_token_threshold": 512},
    ],
)
def test_documents_and_chat_at_full_size(options: dict[str, Any]) -> None:
    rng, now, workload = random.Random("documents"), 0.0, []
    for number in range(60):
        now += rng.expovariate(1.0)
        own = tuple(range(1_000 * number, 1_000 * number + 3))
        if number % 6 == 0:
            document = rng.randrange(3)
            ids = tuple(range(-1_000 * document - 234, -1_000 * document))
            workload.append(Asked(now, 120_000, 300, ids + own[:1]))
        else:
            workload.append(Asked(now, rng.randint(900, 1_500), rng.randint(1, 400), own))
    _, totals = compare(EngineConfig(**options), workload)
    assert totals.prefix_hits > 200_000


@pytest.mark.parametrize("exports", [False, True])
@pytest.mark.parametrize("threshold", [0, 2112])
def test_chunks_of_a_hybrid_end_at_blocks(exports: bool, threshold: int) -> None:
    """Without shared prefixes, and with blocks for all requests."""
    rng, model = random.Random(5), find_model("Qwen3.6-35B-A3B")
    assert model.state is not None
    model = replace(model, state=replace(model.state, exports=exports))
    config = EngineConfig(
        model=model, gpu="h200", max_num_batched_tokens=4_096, max_model_len=32_768,
        long_prefill_token_threshold=threshold,
    )  # fmt: skip
    assert can_skip(config, hopeful=True)
    at, workload = 0.0, []
    for _ in range(60):
        at += rng.choice([0.0, 0.02, 0.3])
        workload.append(Asked(at, rng.choice([30, 700, 1_056, 5_000, 20_000]), rng.randint(1, 90)))
    compare(config, workload)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="--scheduling-policy priority"):
        SkippingEngine(EngineConfig(scheduling_policy="priority"))
    one = SkippingEngine(EngineConfig(max_model_len=100))
    for request in (
        SimRequest("no room for output", 100, 1),
        SimRequest("no output", 10, 0),
    ):
        with pytest.raises(ValueError, match=r"context|output"):
            one.add(request, 0.0)
    assert one.waiting == 0
    assert one.next_at() == inf


def test_what_comes_together_shares_the_first_step() -> None:
    one = SkippingEngine(EngineConfig())
    requests = [SimRequest(str(number), 100, 1 + number) for number in range(2)]
    for request in requests:
        one.add(request, 5.0)
        assert one.next_at() == 5.0
    assert [list(part) for part in one.advance(5.0)] == [[], []]
    first, finished = one.advance(one.next_at())
    assert (list(first), list(finished)) == (requests, requests[:1])
    assert one.running == 1


@pytest.mark.parametrize(("ahead", "steps"), [(False, 1), (True, 2)])
def test_what_comes_just_after_a_step_has_started_waits(ahead: bool, steps: int) -> None:
    """For the next plan: with asynchronous scheduling the next step is planned already."""
    one = SkippingEngine(EngineConfig(async_scheduling=ahead))
    early, late = SimRequest("early", 100, 50), SimRequest("late", 100, 2)
    one.add(early, 0.0)
    one.advance(0.0)
    now = one.next_at()
    one.advance(now)
    all_others = one.next_at() - now
    one.add(late, now + 1e-9)
    admitted_s = one._timing.admit_s(100) if ahead else 0.0  # before the planned step
    assert one.next_at() - now == pytest.approx(steps * all_others / 49 + admitted_s, rel=1e-3)
    assert (early.first_token_s, late.first_token_s) == (now, -1.0)
