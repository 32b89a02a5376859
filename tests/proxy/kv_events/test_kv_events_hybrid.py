"""Replay what real vLLM servers published for hybrid models: what is predicted, they reported.

`tests/support/kv_recordings.py` made the recordings.
"""

import msgspec
import pytest
from kv_recordings import RECORDINGS, Asked, Recording, read_recording
from stages.proxy_stage import on_stage

from forebay.proxy.config.backends import BackendConfig
from forebay.proxy.core.learn.engine_blocks import BlockTranslations, EngineBlocks
from forebay.proxy.core.model import BackendSpec, Bucket
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.kv_events.decode import KvBlocks, chain_keys
from forebay.proxy.kv_events.follower import Follower

RECORDED = sorted(file.name.partition(".")[0] for file in RECORDINGS.glob("*.gz"))


@pytest.fixture(params=RECORDED)
def recording(request: pytest.FixtureRequest) -> Recording:
    return read_recording(request.param)


def label(recording: Recording, name: str) -> int:
    (line,) = [line for line in recording.metrics if line.startswith("vllm:cache_config_info")]
    return int(line.partition(f'{name}="')[2].partition('"')[0])


class Replayed:
    """A follower that is given the batches of a recording.

    Attributes:
        said: what it logged.
        wrong: number of the request, predicted and reported tokens, where these differ.
        checked: number of requests that were predicted exactly.
    """

    def __init__(self, recording: Recording, first: int = 0) -> None:
        """It misses the first batches. After them the cache is unknown."""
        self.said: list[str] = []
        self.wrong: list[tuple[int, int | None, int]] = []
        self.checked = self._number = 0
        self._size = label(recording, "block_size")
        config = BackendConfig(name="b0", url="http://b0", kv_events="tcp://b0:1")
        follower = Follower(
            config, BlockTranslations(0), lambda _, line, *__: self.said.append(line)
        )
        follower._decode = msgspec.msgpack.Decoder().decode
        kv_tokens = float(label(recording, "kv_cache_size_tokens"))
        self.backend = Backend(BackendSpec("b0", 8, kv_tokens), [Bucket("all", 10_000)])
        follower.attach(self.backend)
        for number, asked in enumerate(recording.asked):
            self._predict(number, asked)
            for batch in asked.batches:
                if self._number >= first:
                    follower._take(self._number, batch)
                self._number += 1

    def _predict(self, number: int, asked: Asked) -> None:
        held = self.backend.cache.engine_blocks
        assert held is not None
        if asked.burst or self.backend.cache.mode != "exact":
            return
        # Each block of text is one block of the engine, so nothing depends on the tokenizer.
        whole = (len(asked.prompt) - 1) // self._size * self._size
        keys = chain_keys(asked.prompt[:whole], self._size)
        held.translations.learn(keys, keys, self._size)
        matched = held.match(keys, 0) if keys else 0
        self.checked += 1
        if matched != asked.cached:
            self.wrong.append((number, matched, asked.cached))


def test_the_index_is_exact(recording: Recording) -> None:
    replayed = Replayed(recording)
    assert (replayed.wrong, replayed.said) == ([], [])
    assert replayed.backend.cache.mode == "exact"
    # The first request is asked before the size of a block is known.
    assert replayed.checked == sum(not asked.burst for asked in recording.asked) - 1


@pytest.mark.parametrize("first", [1, 20, 60])
def test_a_follower_that_missed_the_beginning_is_not_exact(
    recording: Recording, first: int
) -> None:
    """All groups share one pool: many known blocks do not mean that no unknown block is held."""
    replayed = Replayed(recording, first)
    assert replayed.backend.cache.mode != "exact"
    assert (replayed.said, replayed.checked) == ([], 0)


def test_the_recording_says_something(recording: Recording) -> None:
    """Blocks were evicted, and a group of layers had lost what attention still held."""
    events = [
        event
        for asked in recording.asked
        for batch in asked.batches
        for event in msgspec.msgpack.decode(batch)[1]
    ]
    removed = {event.get("group_idx") for event in events if event["type"] == "BlockRemoved"}
    kinds = {event.get("kv_cache_spec_kind") for event in events} - {None}
    assert len(removed) > 1
    assert len(kinds) > 1
    assert len({asked.cached for asked in recording.asked}) > 4
    (hits,) = [line for line in recording.metrics if "prefix_cache_hits_total" in line]
    assert sum(asked.cached for asked in recording.asked) == float(hits.rsplit(" ", 1)[1])


async def test_the_kv_size_is_that_of_the_label(recording: Recording) -> None:
    async with on_stage(None) as (on, backends):
        backends[0].metrics = "\n".join([*recording.metrics, ""]).encode()
        link = on.proxy.backends.links["b0"]
        await on.proxy.backends.prober._ask_size(link)
        assert link.kv_tokens == pytest.approx(label(recording, "kv_cache_size_tokens"), 0.01)
    product = label(recording, "num_gpu_blocks") * label(recording, "block_size")
    assert label(recording, "kv_cache_size_tokens") < 0.95 * product


TOKENS = list(range(20))
KEYS = chain_keys(TOKENS, 2)
STORED: dict[str, object] = {
    "type": "BlockStored",
    "parent_block_hash": None,
    "token_ids": TOKENS,
    "block_size": 2,
}
ATTENTION: dict[str, object] = {
    **STORED, "kv_cache_spec_kind": "full_attention", "group_idx": 2,
    "block_hashes": [*range(1, 11)],
}  # fmt: skip
MAMBA: dict[str, object] = {
    **STORED,
    "kv_cache_spec_kind": "mamba",
    "group_idx": 0,
    "block_hashes": [4, 8],
}
WINDOW: dict[str, object] = {
    **STORED, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5,
    "group_idx": 1, "block_hashes": [3, 4, 6, 7, 8],
}  # fmt: skip


def hybrid(*events: dict[str, object]) -> KvBlocks:
    """An engine that published one batch."""
    blocks = KvBlocks(EngineBlocks(BlockTranslations(0)))
    blocks.clear(complete=True)
    blocks.apply(events)
    return blocks


def matched(blocks: KvBlocks, prompt: int) -> int | None:
    """Tokens that are predicted for the first `prompt` tokens of TOKENS."""
    keys = KEYS[: prompt // 2]
    blocks.held.translations.clear()
    blocks.held.translations.learn(keys, keys, 2)
    return blocks.held.match(keys, 0)


def test_an_engine_resumes_where_every_group_can() -> None:
    blocks = hybrid(MAMBA, WINDOW, ATTENTION)  # in the order of their groups
    assert [matched(blocks, prompt) for prompt in (20, 14, 6)] == [16, 8, 0]
    blocks.apply([{"type": "BlockRemoved", "group_idx": 0, "block_hashes": [8]}])
    assert matched(blocks, 20) == 8
    blocks.apply([{"type": "BlockRemoved", "group_idx": 1, "block_hashes": [3]}])
    assert (matched(blocks, 20), len(blocks.held)) == (0, 10)


def test_a_beginning_shorter_than_the_window_is_enough() -> None:
    blocks = hybrid(ATTENTION, {**WINDOW, "block_hashes": [1], "token_ids": TOKENS[:2]})
    assert matched(blocks, 20) == 2


def test_a_group_may_have_larger_blocks() -> None:
    larger = {**WINDOW, "block_size": 4, "block_hashes": [4, 8]}  # two tokens of the window each
    assert matched(hybrid(ATTENTION, larger), 18) == 16
    assert matched(hybrid(ATTENTION, {**larger, "kv_cache_spec_sliding_window": 6}), 18) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_spec_kind": "chunked_local_attention"},
        {"kv_cache_spec_sliding_window": None},
        {"block_size": 3},
        {"block_size": 0},
        {"block_hashes": [3, 77]},  # no hash of the group that has all blocks
    ],
)
def test_a_group_that_cannot_be_followed_is_passed_over(changes: dict[str, object]) -> None:
    blocks = hybrid(ATTENTION, {**WINDOW, **changes})
    blocks.apply([{"type": "BlockRemoved", "group_idx": 1, "block_hashes": [3]}, WINDOW])
    assert matched(blocks, 20) == 20


def test_a_model_of_windows_alone_raises_nothing() -> None:
    first = {"group_idx": 0}
    blocks = hybrid({**WINDOW, **first})
    blocks.apply([{"type": "BlockRemoved", "block_hashes": [3], **first}])
    assert (len(blocks.held), blocks.held.tails) == (0, [])


def test_a_cleared_cache_has_no_window_either() -> None:
    blocks = hybrid(MAMBA, ATTENTION)
    blocks.apply([MAMBA, {"type": "AllBlocksCleared"}, ATTENTION])
    assert matched(blocks, 20) == 20  # until an event of the other group comes
