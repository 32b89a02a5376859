"""Block tables of several groups of layers, with blocks counted by hand."""

from dataclasses import replace

import pytest

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.hardware.kv_layout import WHOLE, KvGroup
from forebay.replay.engine.hardware.specs import LLAMA_3_8B
from forebay.replay.engine.kv_blocks.groups import GroupTables
from forebay.replay.engine.kv_blocks.pool import BlockPool
from forebay.replay.engine.limits import SchedulerLimits
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.scheduler import Scheduler
from forebay.traces.ground.errors import InputError

BLOCK, WINDOW = 16, 33
NEAR = KvGroup(window=WINDOW)  # the token itself and two blocks before it
STATE = KvGroup(state=True)
MIXED = replace(LLAMA_3_8B, layers=3, sliding_layers=2, sliding_window=WINDOW, sliding_first=True)


def scheduler(*groups: KvGroup, blocks: int = 1_000, budget: int = 64) -> Scheduler:
    limits = SchedulerLimits(
        4_096, max_num_batched_tokens=budget, groups=groups, tokens_in_flight=budget
    )
    return Scheduler(limits, BlockPool(blocks))


def request(name: str, prompt: int, hashes: list[int] | None = None) -> EngineRequest:
    own = [hash((name, index)) & (1 << 60) - 1 for index in range(prompt // BLOCK)]
    return EngineRequest(name, prompt, 5, own if hashes is None else hashes)


def run(engine: Scheduler, one: EngineRequest) -> list[int]:
    """Compute one request to its end. Returns the tokens of its steps."""
    engine.add(one)
    steps: list[int] = []
    while engine.running or engine.waiting:
        planned = engine.schedule()
        steps += planned.tokens.values()
        for sampled in planned.sampled:
            sampled.tokens += 1
        engine.finish([r for r in planned.sampled if r.output_tokens == r.output_target])
        engine.pool.check()
    return steps


def held(one: EngineRequest) -> list[int]:
    return [sum(block > 0 for block in table) for table in one.tables]


def test_a_window_gives_back_what_lies_behind_it() -> None:
    engine, one = scheduler(WHOLE, NEAR, NEAR), request("a", 160)
    engine.add(one)
    seen = []
    for _ in range(4):
        planned = engine.schedule()
        seen.append((sum(planned.tokens.values()), held(one)))
        for sampled in planned.sampled:
            sampled.tokens += 1
    # Chunks of 64, 64, 32 tokens. Before a chunk, 32 tokens behind the next one stay.
    assert seen == [(64, [4, 4, 4]), (64, [8, 6, 6]), (32, [10, 4, 4]), (1, [11, 3, 3])]
    assert engine.pool.free_blocks == 999 - 17
    assert isinstance(engine.tables, GroupTables)


def test_a_hit_is_the_longest_that_all_groups_have() -> None:
    """The cache keeps a window's blocks at the end of a prompt, so a longer prompt hits there."""
    engine = scheduler(WHOLE, NEAR, budget=512)
    first = request("a", 161)
    run(engine, first)
    again = request("b", 161, list(first.hashes))
    run(engine, again)
    assert again.cached_tokens == 160
    shorter = request("c", 100, list(first.hashes[:6]))
    run(engine, shorter)
    assert shorter.cached_tokens == 0  # the whole context is cached, the window in it is not
    third = request("d", 100, list(first.hashes[:6]))
    run(engine, third)
    assert third.cached_tokens == 96  # where the request before ended


def test_the_end_of_a_shared_prefix_is_kept_once_it_was_seen() -> None:
    engine = scheduler(WHOLE, NEAR, budget=512)
    shared = request("document", 160).hashes
    cached = []
    for name in "abc":
        one = request(name, 260, shared + request(name, 96).hashes)
        run(engine, one)
        cached.append(one.cached_tokens)
    assert cached == [0, 0, 160]


def test_a_hit_ends_where_blocks_of_both_sizes_end() -> None:
    """Layers that cache half as much have blocks of 32 tokens beside blocks of 16."""
    engine = scheduler(replace(WHOLE, blocks=2), NEAR, budget=512)
    first = request("a", 177)
    run(engine, first)
    again = request("b", 177, list(first.hashes))
    engine.add(again)
    engine.schedule()
    assert again.cached_tokens == 160  # 11 blocks of 16 are cached, 5 of 32
    assert held(again) == [6, 4]


def test_a_chunked_layer_gives_back_the_chunks_before() -> None:
    """Llama 4: chunks of 64 tokens. At a multiple of 64 nothing of such layers is needed."""
    chunks = KvGroup(window=64, chunked=True)
    engine, one = scheduler(WHOLE, chunks), request("a", 144)
    engine.add(one)
    seen = []
    for _ in range(3):
        planned = engine.schedule()
        seen.append(held(one))
        for sampled in planned.sampled:
            sampled.tokens += 1
    assert seen == [[4, 4], [8, 4], [9, 1]]
    again = request("b", 129, list(one.hashes[:8]))
    engine.add(again)
    engine.schedule()
    assert again.cached_tokens == 128  # only the whole context had to be cached


def test_chunked_layers_alone_skip_the_chunks_before_the_last_token() -> None:
    """vLLM looks up a prompt without its last token, which ends inside a block.

    Of 64 tokens 63 are looked up. They lie in chunks of 17, the last of which begins at token 51.
    The three blocks before count as a hit, although nothing is cached.
    """
    engine, one = scheduler(KvGroup(window=17, chunked=True)), request("a", 64)
    assert run(engine, one) == [16, 1, 1, 1, 1]
    assert one.cached_tokens == 48


def test_chunks_end_where_a_state_can_be_kept() -> None:
    engine, one = scheduler(STATE, WHOLE, budget=100), request("a", 250)
    assert run(engine, one) == [96, 96, 48, 10, 1, 1, 1, 1]
    again = request("b", 250, list(one.hashes))
    assert run(engine, again)[0] == 10
    assert again.cached_tokens == 240


def test_a_state_that_is_exported_needs_no_chunk_of_its_own() -> None:
    exporting = replace(STATE, exports=True)
    engine, one = scheduler(exporting, WHOLE, budget=512), request("a", 250)
    assert run(engine, one)[0] == 250
    again = request("b", 250, list(one.hashes))
    run(engine, again)
    assert again.cached_tokens == 240


def test_without_prefix_caching_a_state_is_one_block() -> None:
    limits = SchedulerLimits(4_096, groups=(STATE, WHOLE), enable_prefix_caching=False)
    engine, one = Scheduler(limits, BlockPool(1_000)), request("a", 250)
    engine.add(one)
    engine.schedule()
    assert held(one) == [1, 16]


def test_blocks_of_a_model_with_windows() -> None:
    config = EngineConfig(MIXED, max_model_len=4_096, max_num_batched_tokens=2_048)
    assert config.limits().groups == (NEAR, NEAR, WHOLE)
    core = EngineCore(config)
    one, two = (
        replace(config, disable_hybrid_kv_cache_manager=whole).kv_budget.blocks
        for whole in (False, True)
    )
    assert one // 3 == two  # a block has one layer in place of three
    # Two steps in flight of 2,048 tokens fill the context, so each group has 256 blocks, and a
    # window one more.
    assert config.kv_budget.layout.request_blocks(4_096) == 3 * 256 + 2
    assert core.kv_tokens == int(one / 770 * 4_096)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"vllm_version": "0.29"}, "--vllm-version 0.29: the blocks of layers with a window"),
        (
            {
                "speculative_config": '{"method": "eagle", "num_speculative_tokens": 2}',
                "acceptance": 0.5,
            },
            "--speculative-config: a draft's layers",
        ),
    ],
)
def test_what_is_not_simulated_beside_windows(options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        EngineConfig(MIXED, **options)  # type: ignore[arg-type]
    assert "--disable-hybrid-kv-cache-manager" in str(caught.value)
    EngineConfig(MIXED, disable_hybrid_kv_cache_manager=True, **options)  # type: ignore[arg-type]
