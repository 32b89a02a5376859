"""The blocks a backend holds: the estimate, its correction, and the index from KV events."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stages.engine_stage import Cache

from forebay.proxy.core.learn.engine_blocks import BlockTranslations, EngineBlocks
from forebay.proxy.core.learn.prefix_cache import KEPT_LEAST
from forebay.proxy.core.learn.prefix_index import PrefixIndex, Touch
from forebay.proxy.core.model import BackendSpec, Bucket, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.kv_events.decode import BadEvent, KvBlocks, NoSalt, chain_keys
from forebay.replay.engine.tokenizer import Prompt, encode_ids

BLOCK = 100.0  # tokens of text


def chain(*texts: int) -> tuple[int, ...]:
    """Chained hashes of blocks with these contents."""
    return tuple(hash(texts[: end + 1]) for end in range(len(texts)))


class TestTheGuess:
    def test_blocks_that_were_not_computed_are_not_held(self) -> None:
        index = PrefixIndex(100)
        index.touch(chain(1, 2))
        touch = index.touch(chain(1, 2, 3, 4), 3.0)
        index.untouch(touch, 3)
        assert index.match(chain(1, 2, 3, 4)) == 3
        assert len(index) == 3
        index.untouch(touch, 5)  # more than there is: as it was
        assert index.match(chain(1, 2, 3, 4)) == 3

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["touch", "touch", "touch", "forget", "untouch", "clear"]),
                st.lists(st.integers(0, 2), min_size=1, max_size=6),
                st.integers(0, 12),
            ),
            max_size=60,
        )
    )
    def test_holds_what_a_plain_table_would(self, steps: list[tuple[str, list[int], int]]) -> None:
        """The model: block -> stamp, and what to evict found by sorting."""
        index, table, touches = PrefixIndex(8), dict[int, tuple[float, int]](), list[Touch]()
        before = dict[float, int]()
        prompts = [chain(*texts) for _, texts, _ in steps]
        for kind, texts, number in steps:
            blocks = chain(*texts)
            if kind == "touch":
                held = index.match(blocks)
                touch = index.touch(blocks)
                before[touch.stamp] = held
                touches.append(touch)
                table |= {block: (touch.stamp, -at) for at, block in enumerate(blocks)}
                for block in sorted(table, key=lambda b: table[b])[: max(0, len(table) - 8)]:
                    del table[block]
            elif kind == "clear" and number < 2:
                index.clear()
                table.clear()
            elif kind == "forget" and touches:
                stamp = touches[number % len(touches)].stamp
                index.forget_until(stamp)
                table = {b: entry for b, entry in table.items() if entry[0] > stamp}
            elif kind == "untouch" and touches:
                touch, keep = touches[number % len(touches)], number % 4
                keep = max(keep, before[touch.stamp])
                index.untouch(touch, keep)
                for block in touch.blocks[keep:]:
                    if table.get(block, (0, 0))[0] == touch.stamp:
                        del table[block]
            assert len(index) == len(table)
            for prompt in prompts:
                assert index.match(prompt) == sum(block in table for block in prompt)
        assert len(index._touches) <= index._tidy_at


def a_shaper(kv_tokens: float = 10_000) -> Shaper:
    shaper = Shaper([BackendSpec("a", 64, kv_tokens)], [Bucket("all", 100_000)])
    shaper.backend_up("a", 0.0)
    return shaper


class Asker:
    """Sends prompts through a shaper one after the other, a second each."""

    def __init__(self, shaper: Shaper) -> None:
        self.shaper = shaper
        self.backend: Backend = shaper.backends["a"]
        self._number = 0

    def __call__(self, *texts: int, cached: int | None = None, told: bool = True) -> int:
        """Predicted match in tokens; the answer reports `cached`."""
        self._number += 1
        name, now = str(self._number), float(self._number)
        blocks = chain(*texts)
        request = Request(name, int(len(blocks) * BLOCK) + 1, 0, blocks, BLOCK)
        (send,) = self.shaper.arrive(request, now)
        assert isinstance(send, Send)
        self.shaper.first_token(name, now + 0.1)
        if told:
            self.shaper.used(name, 1, now + 0.2, cached, request.prompt_tokens)
        self.shaper.finish(name, now + 0.3)
        return send.matched_tokens


class TestTheCorrection:
    def test_an_evicted_prefix_takes_all_older_ones_with_it(self) -> None:
        ask = Asker(a_shaper())
        ask(1, 1, 1)
        ask(2, 2, 2)
        ask(3, 3, 3)
        assert ask(2, 2, 2, cached=0) == 300
        assert ask(1, 1, 1, cached=0) == 0  # older than what was gone
        assert ask(3, 3, 3, cached=300) == 300  # newer
        assert ask(2, 2, 2, cached=300) == 300  # computed again
        assert ask.backend.cache.error.answers == 4
        assert ask.backend.cache.error.absolute_tokens == 300
        assert ask.backend.cache.error.within_block == 3
        assert ask.backend.cache.error.bias_tokens == 75

    def test_no_count_is_not_a_count_of_0(self) -> None:
        ask = Asker(a_shaper())
        for _ in range(3):
            ask(1, 1, 1)
        assert ask(1, 1, 1) == 300
        assert ask.backend.cache.mode == "believed"
        assert ask.backend.cache.error.answers == 0
        # Once it has told, leaving it out means 0: some versions do.
        ask(1, 1, 1, cached=300)
        assert ask.backend.cache.mode == "corrected"
        ask(2, 2, 2)
        assert ask.backend.cache.error.answers == 2
        # A server that comes back may have been started otherwise.
        ask.shaper.backend_down("a", 50.0)
        assert ask.backend.cache.mode == "believed"

    def test_less_than_a_block_missing_is_no_eviction(self) -> None:
        ask = Asker(a_shaper())
        ask(9, 9, 9)
        ask(1, 1, 1)
        ask(1, 1, 1, cached=201)
        assert ask(9, 9, 9, told=False) == 300
        assert ask.backend.cache.kept == 1.0

    def test_the_capacity_follows_what_the_engine_keeps_within_bounds(self) -> None:
        ask = Asker(a_shaper())
        for round_ in range(40):
            for document in range(20):  # 6,000 tokens, and nothing is ever cached
                ask(document, 1, 1, cached=0)
            assert KEPT_LEAST <= ask.backend.cache.kept <= 1.0, round_
        assert ask.backend.cache.kept < 0.7
        small = ask.backend.cache.kept
        for _ in range(200):
            for document in range(30):  # 9,000 tokens, and everything is cached after all
                ask(document, 1, 1, cached=300)
        assert small + 0.1 < ask.backend.cache.kept <= 1.5
        assert ask(0, 1, 1, cached=300) >= 200

    def test_a_prefill_under_way_proves_no_eviction(self) -> None:
        """The second of two equal prompts may find nothing though nothing was dropped."""
        shaper = a_shaper()
        ask = Asker(shaper)
        ask(9, 9, 9)
        backend = ask.backend  # which two proxies asked at once; one holds the second back
        for name in ("x", "y"):
            request = Request(name, 301, 0, chain(1, 1, 1), BLOCK)
            backend.send(request, "all", backend.matched_tokens(request), 1.5)
        for name in ("x", "y"):
            backend.first_token(name, 1.9)
            backend.cache.reported(backend.in_flight[name].visit, 0, 301, backend.kv_tokens)
            backend.finished(name, 1.9)
        assert ask(9, 9, 9, told=False) == 300

    def test_a_prefill_that_was_given_up_is_not_held(self) -> None:
        shaper = a_shaper()
        shaper.arrive(Request("x", 301, 0, chain(1, 1, 1), BLOCK), 0.0)
        shaper.finish("x", 0.0)
        assert Asker(shaper)(1, 1, 1) == 0

    def test_the_engines_count_of_tokens_is_the_measure(self) -> None:
        """Predicted in estimated tokens, reported in real ones: twice as many here."""
        shaper = a_shaper()
        Asker(shaper)(1, 1, 1)
        shaper.arrive(Request("x", 301, 0, chain(1, 1, 1), BLOCK), 10.0)
        shaper.used("x", 1, 10.0, 600, 602)
        assert shaper.backends["a"].cache.error.absolute_tokens == 0


KEYS = st.integers(0, 5)


class TestHeld:
    @given(st.lists(st.tuples(st.sampled_from(["stored", "removed", "cleared"]), st.lists(KEYS))))
    def test_counts_copies_as_a_plain_counter(self, steps: list[tuple[str, list[int]]]) -> None:
        held, model = EngineBlocks(BlockTranslations(16)), Counter[int]()
        held.cleared()
        for kind, keys in steps:
            if kind == "stored":
                held.stored(keys)
                model.update(keys)
            elif kind == "removed":
                held.removed(keys)
                for key in keys:
                    model[key] = max(0, model[key] - 1)
            elif len(keys) > 3:
                held.cleared()
                model.clear()
            assert len(held) == model.total()
            assert held._copies == +model

    def test_matches_where_prompts_were_seen_to_part(self) -> None:
        translations = BlockTranslations(10)
        held = EngineBlocks(translations)
        held.cleared()
        assert held.match(chain(1, 2, 3), 3) is None  # nobody has tokenised it
        keys = list(range(35))
        translations.learn(chain(1, 2, 3), keys, BLOCK)
        assert held.match(chain(1, 2, 3), 3) == 0  # whatever is believed
        held.stored(keys[:8])
        assert held.match(chain(1, 2, 3), 3) == 80
        held.stored(keys[8:])
        # Another question about it parts in the third block of text, 2.5 engine blocks into it.
        assert held.match(chain(1, 2, 4), 2) == 200
        translations.learn(chain(1, 2, 4), [*keys[:22], 901, 902], BLOCK)
        assert held.match(chain(1, 2, 5), 2) == 220
        held.removed(keys[15:])
        assert held.match(chain(1, 2, 5), 2) == 150
        # More is believed than is translated: what was sent since.
        held.stored(keys[15:])
        assert held.match(chain(1, 2, 5, 6), 4) is None

    def test_incomplete_until_cleared_or_until_nothing_unknown_has_room(self) -> None:
        held = EngineBlocks(BlockTranslations(16), pool_blocks=4)
        held.translations.learn(chain(1), [7, 8], 32.0)
        held.cleared(complete=False)
        held.stored([7, 8, 1])
        assert held.match(chain(1), 1) is None
        held.stored([2])
        assert held.match(chain(1), 1) == 32
        held.lost()
        assert held.match(chain(1), 1) is None
        held.cleared()
        assert held.match(chain(1), 1) == 0
        held.doubt()
        assert held.match(chain(1), 1) is None
        held.confirm()
        assert held.match(chain(1), 1) == 0

    @given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=60))
    def test_translations_are_bounded(self, prompts: list[list[int]]) -> None:
        translations = BlockTranslations(16, most_keys=40)
        for texts in prompts:
            blocks = chain(*texts)
            keys = [key for block in blocks for key in (block, block + 1)]
            translations.learn(blocks, keys, 32.0)
            assert translations._keys <= 40
            added = [block for new, _ in translations._added.values() for block in new]
            assert sorted(added) == sorted(translations._places)
            if known := translations.known(blocks):
                assert (
                    list(translations.place(blocks[known - 1]).keys)[: 2 * known]
                    == (keys[: 2 * known])
                )

    def test_a_prompt_is_tokenised_once_and_its_likes_once_more(self) -> None:
        translations = BlockTranslations(16)
        document = tuple(range(20))
        assert not translations.wanted(())
        assert translations.wanted(chain(*document, 101))
        translations.learn(chain(*document, 101), [1, 2, 3], 32.0)
        assert translations.wanted(chain(*document, 102))  # where do they part?
        translations.learn(chain(*document, 102), [1, 2, 4], 32.0)
        assert not translations.wanted(chain(*document, 103))
        assert translations.wanted(chain(*document, *range(200, 230)))


class TestEvents:
    @settings(max_examples=30)
    @given(seed=st.integers(0, 1_000), blocks=st.integers(12, 60), salted=st.booleans())
    def test_the_index_is_the_engines_cache(self, seed: int, blocks: int, salted: bool) -> None:
        """Random prompts with common beginnings in a small pool, checked after each."""
        rng, cache = random.Random(seed), Cache(blocks)
        heard = KvBlocks(EngineBlocks(BlockTranslations(0)))
        heard.clear(complete=True)
        prompts = list[tuple[Prompt, str | None]]()
        for _ in range(25):
            tokens = [rng.randrange(3)] * rng.randint(1, 150) + [rng.randrange(9)] * 40
            salt = rng.choice([None, "s"]) if salted else None
            prompts.append((prompt := encode_ids(tokens), salt))
            events = cache.ask(prompt, rng.randint(1, 40), salt)
            heard.apply(events if rng.random() < 0.5 else [as_list(event) for event in events])
            pool, copies = cache.core.pool, heard.held._copies
            registered = [h for h in map(pool.hash_of, range(1, blocks)) if h is not None]
            assert len(heard.held) == len(registered)
            for other, other_salt in prompts:
                hashes = other.block_hashes(32, other_salt)
                extra = [[other_salt]] if other_salt else []
                keys = chain_keys(other.token_ids(), 32, extra_keys=extra)
                assert [key in copies for key in keys] == [h in registered for h in hashes]

    def test_keys_are_chained(self) -> None:
        keys = chain_keys(range(100), 16)
        assert len(keys) == len(set(keys)) == 6
        assert chain_keys(range(16, 100), 16, keys[0]) == keys[1:]
        salted = chain_keys(range(100), 16, extra_keys=[["salt"]])
        assert not set(keys) & set(salted)
        assert all(a != b for a, b in pairwise(keys))

    @pytest.mark.parametrize(
        "event",
        [
            {},
            7,
            [],
            {"type": "BlockStored"},
            {"type": "BlockRemoved", "block_hashes": [5]},
            {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 9,
             "token_ids": [1], "block_size": 1},
            {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
             "token_ids": [1], "block_size": 1},
            {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
             "token_ids": [1 << 40], "block_size": 1},
            {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
             "token_ids": [1], "block_size": 0},
        ],
    )  # fmt: skip
    def test_an_impossible_event_is_said(self, event: object) -> None:
        heard = KvBlocks(EngineBlocks(BlockTranslations(0)))
        heard.clear(complete=True)
        with pytest.raises(BadEvent):
            heard.apply([event])

    def test_other_tiers_and_groups_are_passed_over(self) -> None:
        heard = KvBlocks(EngineBlocks(BlockTranslations(0)))
        heard.clear(complete=True)
        stored = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None,
                  "token_ids": [1, 2], "block_size": 2}  # fmt: skip
        heard.apply([{**stored, "medium": "CPU"}, {**stored, "group_idx": 1}])
        assert len(heard.held) == 0
        heard.apply([{**stored, "medium": "GPU", "group_idx": 0}, {"type": "SomethingNew"}])
        assert len(heard.held) == 1

    def test_groups_of_lists_are_passed_over_and_what_newer_ones_add(self) -> None:
        heard = KvBlocks(EngineBlocks(BlockTranslations(0)))
        heard.clear(complete=True)
        stored = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, [None]]
        heard.apply([[*stored, 1], ["BlockRemoved", [1], "GPU", 1]])
        assert len(heard.held) == 0
        heard.apply([[*stored, 0, "full_attention", None]])
        assert len(heard.held) == 1
        heard.apply([["BlockRemoved", [1], "GPU", 1]])
        assert len(heard.held) == 1

    def test_only_groups_that_keep_whole_prompts_count(self) -> None:
        """Three Mamba groups come first; their blocks hold a state each."""
        held = KvBlocks(EngineBlocks(BlockTranslations(0)))
        held.clear(complete=True)
        tokens = list(range(3_840))
        stored = {"type": "BlockStored", "parent_block_hash": None, "token_ids": tokens,
                  "block_size": 768}  # fmt: skip
        held.apply(
            [{**stored, "kv_cache_spec_kind": "mamba", "group_idx": group, "block_hashes": [5]}
             for group in range(3)]
        )  # fmt: skip
        attention = {**stored, "kv_cache_spec_kind": "mla_attention", "group_idx": 3}
        held.apply([{**attention, "block_hashes": [1, 2, 3, 4, 5]}])
        assert (len(held.held), held.held.complete) == (5, True)
        assert list(held.held._copies) == chain_keys(tokens, 768)
        held.apply([{"type": "BlockRemoved", "block_hashes": [5], "group_idx": 0}])
        assert len(held.held) == 5
        held.apply([{"type": "BlockRemoved", "block_hashes": [5], "group_idx": 3}])
        assert len(held.held) == 4

    def test_a_sliding_window_behind_attention_is_ignored(self) -> None:
        held = KvBlocks(EngineBlocks(BlockTranslations(0)))
        held.clear(complete=True)
        whole = ["BlockStored", [1, 2, 3, 4, 5], None, list(range(80)), 16, None, "GPU", None, None]
        window = ["BlockStored", [9], None, list(range(64)), 64, None, "GPU", None, None]
        held.apply([[*whole, 0, "full_attention"], [*window, 1, "sliding_window", 128]])
        assert len(held.held) == 5

    def test_a_block_is_held_while_every_attention_group_holds_it(self) -> None:
        held = KvBlocks(EngineBlocks(BlockTranslations(0)))
        held.clear(complete=True)
        stored = {"type": "BlockStored", "parent_block_hash": None, "token_ids": [1, 2, 3, 4],
                  "block_size": 2, "block_hashes": [1, 2]}  # fmt: skip
        first = {**stored, "kv_cache_spec_kind": "sink_full_attention", "group_idx": 1}
        second = {**stored, "kv_cache_spec_kind": "full_attention", "group_idx": 4}
        larger = {**stored, "kv_cache_spec_kind": "mla_attention", "group_idx": 5, "block_size": 4,
                  "block_hashes": [7]}  # fmt: skip
        held.apply([first])
        assert len(held.held) == 2
        held.apply([second, larger])
        assert len(held.held) == 2
        removed = {"type": "BlockRemoved", "block_hashes": [2]}
        held.apply([{**removed, "group_idx": 4}])
        assert list(held.held._copies) == chain_keys([1, 2], 2)
        held.apply([{**removed, "group_idx": 1}, {**second, "parent_block_hash": 1,
                    "token_ids": [3, 4], "block_hashes": [2]}])  # fmt: skip
        assert len(held.held) == 1
        held.apply([{**first, "parent_block_hash": 1, "token_ids": [3, 4], "block_hashes": [2]}])
        assert len(held.held) == 2

    @pytest.mark.parametrize("newer", [[], [None], [None, None], [None, []]])
    def test_a_salt_that_is_not_told_is_no_absent_salt(self, newer: list[object]) -> None:
        heard = KvBlocks(EngineBlocks(BlockTranslations(0)), salted=True)
        heard.clear(complete=True)
        first = ["BlockStored", [1], None, [1, 2], 2, None, "GPU"]
        with pytest.raises(NoSalt):
            heard.apply([[*first, *newer]])
        heard.apply([[*first, None, [None], 0]])  # a stranger's prompt, without a salt
        assert list(heard.held._copies) == chain_keys([1, 2], 2)
        heard.apply([["BlockStored", [2], 1, [3, 4], 2, None, "GPU"]])  # no first one: no salt
        assert len(heard.held) == 2
        heard.salted = False
        heard.apply([["BlockStored", [3], None, [5, 6], 2, None, "GPU", *newer]])
        assert len(heard.held) == 3


def as_list(event: dict[str, object]) -> list[object]:
    """The event as vLLM 0.20 wrote it, before events had named fields."""
    names = {
        "BlockStored": ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
                        "medium", "lora_name", "extra_keys", "group_idx"],
        "BlockRemoved": ["block_hashes", "medium", "group_idx"],
        "AllBlocksCleared": [],
    }[str(event["type"])]  # fmt: skip
    return [event["type"], *(event[name] for name in names)]
