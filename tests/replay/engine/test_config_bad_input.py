"""What no engine can serve: one line of key, value and remedy, before anything starts."""

import json
from pathlib import Path

import pytest
from commands import refusal

from forebay.proxy.cli import main
from forebay.replay.engine.flags import PlacementFlags

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
}  # fmt: skip
SHEET = {"name": "card", "peak_flops": 9.895e14, "bandwidth": 4.8e12, "memory_gib": 139.8,
         "multiprocessors": 132}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model {folder}/unknown/config.json", ("unheard_of", "config.json")),
        ("--model llama-3-8b --gpu {folder}/terabytes.json", ("bandwidth", "4.8", "bytes/s")),
        ("--model llama-3-8b --gpu {folder}/mib.json", ("memory_gib", "143155")),
        ("--model {folder}/fp5/config.json", ("fp5", "hf_quant_config.json")),
        ("--model llama-3-8b -pp 2", ("--pipeline-parallel-size 2", "--tensor-parallel-size")),
        ("--model llama-3-8b --enable-expert-parallel", ("--enable-expert-parallel", "leave it")),
    ],
)
def test_one_line_names_key_value_and_remedy(
    words: str, says: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in (
        ("unknown", {**LLAMA, "architectures": ["UnheardOf"], "model_type": "unheard_of"}),
        ("fp5", LLAMA),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    quantised = {"quantization": {"quant_algo": "fp5"}}
    (tmp_path / "fp5" / "hf_quant_config.json").write_text(json.dumps(quantised))
    (tmp_path / "terabytes.json").write_text(json.dumps({**SHEET, "bandwidth": 4.8}))
    (tmp_path / "mib.json").write_text(json.dumps({**SHEET, "memory_gib": 143_155}))
    assert main(["engine", *words.format(folder=tmp_path).split(), "--port", "0"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.strip().splitlines()
    for word in says:
        assert word.lower() in line.lower(), line


@pytest.mark.parametrize(
    "words",
    [
        "simulate {trace} --gpus 2",
        "size --users 9 --document-tokens 9000",
        "tune {trace}",
        "kv",
        "search {trace} --target http://x",
    ],
)
def test_every_command_that_simulates_rejects_ranks_by_name(words: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    flag = "--data-parallel-size 2"
    line = refusal(*words.format(trace=trace).split(), *flag.split())
    assert f"{flag}: " in line
    assert "leave it out" in line


def test_a_single_rank_is_the_default() -> None:
    assert PlacementFlags(data_parallel_size=1, pipeline_parallel_size=1).placement() == {}
