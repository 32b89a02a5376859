"""--kv-offloading-size: a document that left the GPU comes back from the host's memory.

`test_scheduler_vllm` compares each step with vLLM's own OffloadingConnector. Here is the time.
"""

import random
from dataclasses import replace
from math import inf

import pytest

from forebay.replay.engine.async_engine import new_core
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.hardware.find import find_gpu
from forebay.replay.engine.hardware.specs import GpuFeatures
from forebay.replay.engine.request import EngineRequest
from forebay.replay.sim.engine.request import SimRequest
from forebay.replay.sim.engine.served import Engine, served_engine
from forebay.traces.ground.errors import InputError

DOCUMENT, BLOCK = 60_000, 16
BLOCK_BYTES = 131_072 * BLOCK  # Llama-3-8B in 16 bits
NGRAM = '{"method": "ngram", "num_speculative_tokens": 2}'
CARD = replace(find_gpu("h200"), name="card", features=GpuFeatures())
PCIE = 63e9  # bytes/s of an H200's data sheet, one direction
ONE_DOCUMENT = EngineConfig(  # two documents do not fit beside each other
    max_model_len=65_536, num_gpu_blocks_override=5_000, kv_offloading_size=64.0
)


def question(name: str, document: int, tokens: int = DOCUMENT) -> SimRequest:
    request = SimRequest(name, tokens, 4)
    request.ids = tuple(range(document * 1_000, document * 1_000 + tokens // 512))
    request.block_tokens = 512
    return request


def answer(engine: Engine, *requests: SimRequest, now: float) -> float:
    """Send the requests together and play until the engine is idle. Return the time."""
    for request in requests:
        engine.add(request, now)
    while engine.next_at() < inf:
        now = engine.next_at()
        engine.advance(now)
    return now


def visits(config: EngineConfig, *, others: int) -> tuple[float, SimRequest]:
    """Ask about a document, about `others`, and again. Return the last TTFT and its request."""
    engine, now = served_engine(config).engine, 0.0
    for number in range(others + 1):
        now = answer(engine, question(f"first {number}", number), now=now) + 1
    again = question("again", 0)
    answer(engine, again, now=now)
    return again.first_token_s - now, again


@pytest.mark.parametrize("ahead", [True, False])
def test_second_visit_costs_the_load_and_not_the_prefill(ahead: bool) -> None:
    config = replace(ONE_DOCUMENT, async_scheduling=ahead)
    computed, _ = visits(replace(config, kv_offloading_size=None), others=2)
    cached, _ = visits(config, others=0)
    loaded, again = visits(config, others=2)
    blocks = DOCUMENT // 512 * 512 // BLOCK
    assert again.cached_tokens == blocks * BLOCK
    # The loop looks once a millisecond whether the blocks have arrived.
    assert loaded - cached == pytest.approx(blocks * BLOCK_BYTES / PCIE, abs=0.003)
    assert loaded < 0.15 * computed


def test_memory_for_one_document_forgets_the_other() -> None:
    gib = DOCUMENT * BLOCK_BYTES / BLOCK / 2**30
    _, again = visits(replace(ONE_DOCUMENT, kv_offloading_size=1.2 * gib), others=2)
    assert again.cached_tokens == 0
    _, again = visits(replace(ONE_DOCUMENT, kv_offloading_size=2.2 * gib), others=1)
    assert again.cached_tokens > 0


def test_chats_decode_and_start_while_a_document_is_loaded() -> None:
    engine, now = served_engine(ONE_DOCUMENT).engine, 0.0
    for document in range(3):
        now = answer(engine, question(f"first {document}", document), now=now) + 1
    running = SimRequest("running", 200, 400)
    engine.add(running, now)
    while engine.next_at() < now + 0.5:
        engine.advance(engine.next_at())
    now += 0.5
    answer(
        engine,
        again := question("again", 0),
        same := question("same", 0),
        chat := SimRequest("chat", 200, 4),
        now=now,
    )
    # The load lasts 0.12 s. Before it the engine admits the two documents, 0.06 s.
    assert chat.first_token_s < again.first_token_s - 0.08
    assert running.stall_s < 0.1
    assert same.cached_tokens > 0.99 * DOCUMENT  # it waited for the same blocks


def test_abort_frees_the_blocks_when_the_load_ends() -> None:
    core = EngineCore(replace(ONE_DOCUMENT, async_scheduling=False))
    now = 0.0
    first = list(range(DOCUMENT // BLOCK))
    for name, hashes in (("a", first), ("b", first[::-1])):
        core.add(EngineRequest(name, DOCUMENT, 1, hashes=hashes))
        while core.has_work:
            now += core.step(now).duration_s
    core.add(EngineRequest("again", DOCUMENT, 1, hashes=first))
    now += core.step(now).duration_s
    assert (core.scheduler.deferred, core.waiting) == (1, 1)
    assert core.kv_usage > 0.7
    core.abort("again")
    assert (core.scheduler.deferred, core.waiting) == (0, 0)
    busy_s = core.busy_s
    while core.has_work:
        now += core.step(now).duration_s
    assert core.kv_usage == 0
    assert core.busy_s == busy_s  # to wait for a load is no work of the GPU
    core.pool.check()


def test_prompt_wholly_from_the_host_still_computes_its_last_token() -> None:
    core, now = EngineCore(ONE_DOCUMENT), 0.0
    for name, first in (("a", 0), ("b", 10_000), ("c", 20_000), ("again", 0)):
        hashes = list(range(first, first + DOCUMENT // BLOCK))
        core.add(request := EngineRequest(name, DOCUMENT, 1, hashes))
        while core.has_work:
            now += core.step(now).duration_s
    assert request.cached_tokens == request.loaded_tokens == DOCUMENT - 1


def test_prompt_larger_than_the_memory_leaves_no_beginning() -> None:
    small = replace(ONE_DOCUMENT, kv_offloading_size=0.8 * DOCUMENT * BLOCK_BYTES / BLOCK / 2**30)
    _, again = visits(small, others=2)
    assert again.cached_tokens == 0


def test_load_with_the_higher_priority_starts_first() -> None:
    config = replace(ONE_DOCUMENT, scheduling_policy="priority", async_scheduling=False)
    core, now = EngineCore(replace(config, num_gpu_blocks_override=4_200, max_num_seqs=1)), 0.0
    prompts = {"low": list(range(60)), "high": list(range(1_000, 1_060))}
    others = [list(range(first, first + 4_090)) for first in (10_000, 20_000)]
    for hashes in (*prompts.values(), *others):
        core.add(EngineRequest(str(hashes[0]), len(hashes) * BLOCK + 1, 1, hashes=list(hashes)))
        while core.has_work:
            now += core.step(now).duration_s
    core.add(EngineRequest("other", 3_000 * BLOCK, 2))
    for name, hashes in prompts.items():
        core.add(EngineRequest(name, 961, 1, hashes=list(hashes), priority=name == "low"))
    ends = []
    while core.has_work:
        result = core.step(now)
        now += result.duration_s
        ends += [request.id for request in result.finished]
    assert ends.index("high") < ends.index("low")


@pytest.mark.parametrize("seed", range(40))
def test_random_requests_end_and_give_every_block_back(seed: int) -> None:
    rng = random.Random(seed)
    core = new_core(
        EngineConfig(
            gpu=replace(CARD, features=GpuFeatures(host_bandwidth=rng.choice([1e9, 1e10, PCIE]))),
            max_model_len=512,
            num_gpu_blocks_override=rng.choice([40, 60, 120]),
            max_num_batched_tokens=rng.choice([64, 256]),
            max_num_seqs=rng.choice([2, 8]),
            kv_offloading_size=rng.choice([20, 60, 500]) * BLOCK_BYTES / 2**30,
            async_scheduling=rng.random() < 0.5,
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            watermark=rng.choice([0.0, 0.1]),
        )
    )
    roots = [[rng.randrange(1 << 60) for _ in range(30)] for _ in range(4)]
    coming, now = 60, 0.0
    while coming or core.has_work:
        while coming and rng.random() < 0.3:
            coming -= 1
            hashes = rng.choice(roots)[: rng.randint(1, 30)]
            tokens = len(hashes) * BLOCK + rng.choice([0, 3, 9])
            priority = rng.randrange(3)
            core.add(EngineRequest(str(coming), tokens, 20, hashes, priority=priority))
        if rng.random() < 0.03:
            core.abort(str(rng.randrange(60)))
        if core.has_work:
            now += core.step(now).duration_s
            core.pool.check()
    assert (core.waiting, core.running) == (0, 0)
    # The load of an aborted request ends later.
    assert core.scheduler.loading is not None
    core.scheduler.loading.begin(now + 60.0)
    assert core.pool.free_blocks == core.pool.num_blocks - 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_offloading_size": 0.0}, "--kv-offloading-size 0.0: give GiB, more than 0"),
        ({"kv_offloading_size": 0.001}, "a block needs 0.00195 GiB; give more"),
        ({"kv_offloading_size": inf}, "--kv-offloading-size inf: give GiB"),
        ({"enable_prefix_caching": False}, "not simulated with --no-enable-prefix-caching"),
        ({"scheduler_cls": "forebay"}, "not simulated with --scheduler-cls forebay"),
        ({"speculative_config": NGRAM, "acceptance": 0.5}, "not simulated with --speculative"),
        ({"model": "gpt-oss-120b"}, "only models whose layers all keep the whole context"),
        ({"gpu": CARD}, "its file does not state host_bandwidth"),
        ({"vllm_version": "0.29"}, "--kv-offloading-size"),
    ],
)
def test_what_cannot_be_simulated_is_one_error(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        EngineConfig(**{"kv_offloading_size": 8.0, **options})  # type: ignore[arg-type]
