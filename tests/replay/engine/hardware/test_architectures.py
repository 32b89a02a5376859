"""A configuration whose layers are not counted is refused by the name of the key that says so."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.kv_models import CONFIGS, write_config

from forebay.proxy.cli import main
from forebay.replay.engine.hardware.architectures import KNOWN
from forebay.replay.engine.hardware.hf_config import read_shape
from forebay.traces.ground.errors import InputError

LLAMA = CONFIGS["meta-llama/Llama-3.1-8B"]
UNCOUNTED = [
    ({"model_type": "falcon_h1", "mamba_d_state": 256}, "mamba_d_state"),
    ({"model_type": "bamba", "attn_layer_indices": [9, 18, 27]}, "attn_layer_indices"),
    ({"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"]}, "layers_block_type"),
    ({"model_type": "jamba", "attn_layer_period": 8}, "attn_layer_period"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
    ({"model_type": "olmo_hybrid", "full_attention_interval": 4}, "full_attention_interval"),
    ({"model_type": "qwen4_exp", "index_topk": 2048}, "index_topk"),
    ({"model_type": "deepseek_v4", "compress_ratios": [4, 128]}, "compress_ratios"),
    ({"model_type": "gemma4", "global_head_dim": 512}, "global_head_dim"),
    ({"model_type": "gemma3n", "num_kv_shared_layers": 15}, "num_kv_shared_layers"),
    ({"model_type": "mimo_v2", "hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
    ({"model_type": "kimi", "linear_attn_config": {"full_attn_layers": [4]}}, "linear_attn_config"),
    ({"model_type": "minimax", "attn_type_list": [0, 0, 1]}, "attn_type_list"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder"),
    ({"model_type": "bert"}, "model_type is 'bert'"),
    ({"model_type": None}, "model_type is missing"),
    ({"model_type": "rwkv7"}, "model_type is 'rwkv7'"),
]


@pytest.mark.parametrize(("changed", "named"), UNCOUNTED)
def test_what_is_not_counted_is_refused_by_its_key(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"config\.json: {named}"):
        read_shape(write_config(tmp_path, {**LLAMA, **changed}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "kimi_linear", "linear_attn_config": {"a": 1}}, "num_heads is missing"),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": 4}},
            "full_attn_layers is not a list",
        ),
        (
            {"model_type": "minimax_m3", "sparse_attention_config": {"a": 1}},
            "sparse_index_dim is missing",
        ),
        ({"model_type": "qwen3", "layer_types": [{}] * 32}, "layer_types holds {}"),
    ],
)
def test_sizes_of_special_layers_are_checked_as_all_fields_are(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        read_shape(write_config(tmp_path, LLAMA | fields))


@pytest.mark.parametrize("command", ["kv", "engine", "simulate {trace}", "size", "search {trace}"])
def test_every_command_refuses_a_hybrid_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, {**LLAMA, "model_type": "falcon_h1", "mamba_d_state": 256})
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"id": f"r{n}", "arrival_s": n, "input_tokens": 9, "output_tokens": 9} for n in range(3)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = command.format(trace=trace).split()
    if words[0] == "search":
        words += ["--target", f"sim:{path}", "--requests", "100", "--arrivals", "poisson",
                  "--attainment", "0.5"]  # fmt: skip
    else:
        words += ["--model", str(path), "--gpu", "h200"]
    words += {"size": ["--users", "5", "--document-tokens", "100", "--jobs", "1"],
              "engine": ["--port", "0"]}.get(words[0], [])  # fmt: skip
    assert main(words) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "mamba_d_state: this model has a recurrent state" in said[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_known_configuration_is_counted(name: str, tmp_path: Path) -> None:
    assert read_shape(write_config(tmp_path, CONFIGS[name])).weight_bytes > 0


def test_a_key_of_another_model_that_is_off_does_not_matter(tmp_path: Path) -> None:
    off = {"is_encoder_decoder": False, "num_kv_shared_layers": 0, "index_topk": None}
    assert read_shape(write_config(tmp_path, {**LLAMA, **off})).layers == 32
    assert "llama" in KNOWN
