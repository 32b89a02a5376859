"""Text for block ids: equal ids give equal text, different ids different text."""

import pytest
from common_start import common_length
from hypothesis import given, settings
from hypothesis import strategies as st
from stages.started import printed_with_two_hash_seeds

from forebay.traces.ground.schema import TraceRequest
from forebay.traces.text import BYTES_PER_TOKEN, WORDS, block_text, prompt_text

ENGINE_BLOCK_TOKENS = 16  # of vLLM's default KV block: any two block ids differ within it
ENGINE_BLOCK_BYTES = ENGINE_BLOCK_TOKENS * BYTES_PER_TOKEN
ids = st.integers(0, 2**64 - 1)
salts = st.text(max_size=8)


def test_the_table_is_256_words_of_four_bytes() -> None:
    assert len(set(WORDS)) == 256
    assert all(len(word) == 4 and word[:1] == b" " and word[1:].isalpha() for word in WORDS)


# Two ids drawn apart nearly always differ in their lowest byte: make every byte the first to.
id_pairs = st.builds(
    lambda one, change, byte: (one, (one ^ change << 8 * byte) % 2**64),
    ids,
    ids,
    st.integers(0, 8),
)


@given(id_pairs, salts)
def test_two_ids_part_at_their_first_differing_byte(pair: tuple[int, int], salt: str) -> None:
    one, other = pair
    texts = [block_text(block, 512, salt).decode() for block in (one, other)]
    spelt = [block.to_bytes(8, "little") for block in (one, other)]
    same = common_length(*spelt)
    common = common_length(*texts)
    if one == other:
        assert texts[0] == texts[1]
    else:
        assert 4 * same <= common < 4 * (same + 1)
        assert common < ENGINE_BLOCK_BYTES


@given(ids, st.integers(0, 700), st.integers(0, 700), salts)
def test_a_block_is_four_bytes_a_token_and_a_prefix_of_a_longer_one(
    block: int, tokens: int, more: int, salt: str
) -> None:
    text = block_text(block, tokens, salt)
    assert len(text) == 4 * tokens
    assert block_text(block, tokens + more, salt).startswith(text)


@given(ids)
def test_a_fresh_salt_makes_text_that_no_engine_block_has(block: int) -> None:
    one, other = block_text(block, 512, "run 1"), block_text(block, 512, "run 2")
    cuts = range(0, len(one), ENGINE_BLOCK_BYTES)
    assert all(
        one[at : at + ENGINE_BLOCK_BYTES] != other[at : at + ENGINE_BLOCK_BYTES] for at in cuts
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[TraceRequest, TraceRequest, int]:
    """Two requests and how many leading blocks they share."""
    block_tokens = draw(st.sampled_from([16, 48, 512]))
    shared = draw(st.lists(ids, max_size=5))
    tails = [draw(st.lists(ids, min_size=1, max_size=4)) for _ in range(2)]
    one, other = draw(id_pairs.filter(lambda pair: pair[0] != pair[1]))
    tails[0][0], tails[1][0] = one, other
    requests = []
    for name, tail in zip("ab", tails, strict=True):
        blocks = (*shared, *tail)
        last = draw(st.integers(8, block_tokens))  # below 8 tokens an id is not spelt in full
        tokens = block_tokens * (len(blocks) - 1) + last
        requests.append(TraceRequest(name, 0, tokens, 1, blocks, block_tokens))
    return requests[0], requests[1], len(shared) * block_tokens


@given(pairs(), salts)
def test_prompts_share_exactly_the_tokens_of_their_equal_leading_ids(
    pair: tuple[TraceRequest, TraceRequest, int], salt: str
) -> None:
    one, other, shared_tokens = pair
    texts = [prompt_text(request, salt) for request in (one, other)]
    for request, text in zip((one, other), texts, strict=True):
        assert len(text.encode()) == BYTES_PER_TOKEN * request.input_tokens
    common = common_length(*texts)
    assert shared_tokens * 4 <= common < shared_tokens * 4 + ENGINE_BLOCK_BYTES
    # What an engine would find cached: whole blocks only, here exactly the shared ones.
    assert common // ENGINE_BLOCK_BYTES == shared_tokens // ENGINE_BLOCK_TOKENS


@settings(max_examples=30)
@given(st.text(min_size=1), st.text(min_size=1), st.integers(16, 2_000))
def test_a_request_of_lengths_only_shares_nothing(one: str, other: str, tokens: int) -> None:
    texts = [prompt_text(TraceRequest(name, 0, tokens, 1), "s") for name in (one, other)]
    assert len(texts[0]) == 4 * tokens
    assert (texts[0] == texts[1]) == (one == other)
    if one != other:
        assert common_length(*texts) < ENGINE_BLOCK_BYTES


def test_text_of_the_trace_is_passed_on_as_it_is() -> None:
    assert prompt_text(TraceRequest("a", 0, 1, 1, text="Grüße"), "salt") == "Grüße"


def test_long_blocks_are_whole_too() -> None:
    assert block_text(5, 200_000, "s")[: 4 * 1_024] == block_text(5, 1_024, "s")
    assert len(block_text(5, 200_000, "s")) == 800_000


@pytest.mark.parametrize(("blocks", "tokens"), [((), 5), ((1,), 513), ((1, 2), 512), ((-1,), 5)])
def test_blocks_that_do_not_make_the_prompt_are_refused(
    blocks: tuple[int, ...], tokens: int
) -> None:
    with pytest.raises(ValueError, match=r"blocks of 512 tokens do not make|outside"):
        prompt_text(TraceRequest("a", 0, tokens, 1, blocks), "s")


GOLDEN = " bar ace ace ace ace ace ace ace who fir may leg pet ram too cat lit pad van use pot"


def test_the_text_is_the_same_in_every_process() -> None:
    """Golden too: changing the text makes runs before and after it no longer comparable."""
    program = (
        "from forebay.traces.text import *\n"
        "from forebay.traces.ground.schema import TraceRequest as T\n"
        "print(prompt_text(T('a', 0, 700, 1, (22, 2**63)), 's'), end='')\n"
        "print(prompt_text(T('b', 0, 40, 1), 's'))"
    )
    outputs = printed_with_two_hash_seeds(program)
    here = prompt_text(TraceRequest("a", 0, 700, 1, (22, 2**63)), "s")
    here += prompt_text(TraceRequest("b", 0, 40, 1), "s")
    assert outputs == {here + "\n"}
    assert here.startswith(GOLDEN)
