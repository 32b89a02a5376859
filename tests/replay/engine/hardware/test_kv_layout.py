"""Layers of two kinds in blocks, by the rules of vLLM 0.32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import write_config

from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.replay.engine.hardware.kv_layout import WHOLE, KvOptions, kv_layout
from forebay.replay.engine.hardware.specs import LLAMA_3_8B

LLAMA = LLAMA_3_8B.shape


def write(folder: Path, **changed: Any) -> Path:
    return write_config(folder, "meta-llama/Llama-3.1-8B", **changed)


@pytest.mark.parametrize(("full", "groups"), [(17, (17, 1, 2)), (18, (12, 2, 3))])
def test_fewer_than_half_as_many_more_layers_are_no_third_group(
    full: int, groups: tuple[int, int, int]
) -> None:
    shape = replace(LLAMA, layers=full + 12, sliding_layers=12, sliding_window=4096)
    layout = kv_layout(shape, KvOptions())
    layers = layout.block_bytes // (16 * 4096)
    assert (layers, layout.groups.count(WHOLE), len(layout.groups)) == groups


@pytest.mark.parametrize(
    ("keys", "chunked"),
    [({}, 24), ({"no_rope_layers": [1, 1, 0] * 10 + [1, 1]}, 22), ({"no_rope_layers": []}, 24)],
)
def test_chunks_hold_no_block_beside_their_tokens(
    keys: dict[str, Any], chunked: int, tmp_path: Path
) -> None:
    """Llama 4: the layers with RoPE attend inside chunks, whose first token starts a block."""
    path = write(tmp_path, attention_chunk_size=8192, **keys)
    shape = read_shape(path)
    assert (shape.sliding_layers, shape.sliding_window, shape.chunked) == (chunked, 8192, True)
    layout = kv_layout(shape, KvOptions(max_num_batched_tokens=2048))
    full = layout.groups.count(WHOLE)
    chunks = layout.request_blocks(131_072) - full * 8192
    assert chunks == (len(layout.groups) - full) * (8192 + 2048) // 16


def test_the_window_of_cohere_does_not_count_the_token_itself(tmp_path: Path) -> None:
    changed = {"model_type": "cohere2", "sliding_window": 4096}
    shape = read_shape(write(tmp_path, **changed))
    assert (shape.sliding_layers, shape.sliding_window) == (24, 4097)


def test_a_window_that_is_not_shorter_than_the_context_reserves_a_block_more(
    tmp_path: Path,
) -> None:
    """As in vLLM, which keeps the layer's kind whatever the length of its window."""
    options = KvOptions(max_num_batched_tokens=2048)
    plain = kv_layout(read_shape(write(tmp_path)), options)
    long = kv_layout(read_shape(write(tmp_path, sliding_window=262_144)), options)
    assert long.request_blocks(131_072) == plain.request_blocks(131_072) + 1
    assert (long.block_bytes, long.one_kind) == (plain.block_bytes, True)
    unused = read_shape(write(tmp_path, sliding_window=262_144, use_sliding_window=False))
    assert kv_layout(unused, options) == plain
