"""`forebay size` beside deployments that others measured: the servers that a load needs."""

import json
from math import sqrt
from pathlib import Path

import pytest
from fakes.kv_models import LOW_PRECISION

from forebay.proxy.cli import main

# aiconfigurator-core 0.12.0, systems/silicon_sample.csv: closed loops of InferenceMAX, for Qwen3
# and Llama of an unknown client. Model, GPU, GPUs of a server, prompt, answer, the mean as a share
# of these lengths, and TTFT and TPOT in ms with 16 and 32 in flight. The last number is what `size`
# says for a load that needs six such servers.
PUBLISHED = [
    ("gpt-oss-120b", "h200", 1, 8192, 1024, 0.9, 661, 15.75, 896, 24.80, 6),
    ("gpt-oss-120b", "h100", 2, 1024, 1024, 0.9, 91, 8.18, 119, 10.94, 7),
    ("gpt-oss-120b", "b200", 1, 1024, 1024, 0.9, 61, 5.84, 74, 7.93, 8),
    ("MiniMax-M2.5", "h200", 4, 8192, 1024, 0.9, 550, 19.93, 789, 29.57, 6),
    ("MiniMax-M2.5", "b200", 2, 8192, 1024, 0.9, 410, 15.94, 584, 22.70, 7),
    ("Kimi-K2.5", "h200", 8, 8192, 1024, 0.9, 832, 21.94, 1234, 34.87, 7),
    ("Qwen3-32B", "h100", 4, 4096, 512, 1.0, 513, 15.43, 634, 22.03, 5),
    ("Llama-3.1-70B", "h200", 2, 8192, 1024, 1.0, 1249, 27.47, 1821, 46.07, 6),
]
LOAD = 5.5  # times what one server serves at the target: six are needed


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]} on {row[2]} {row[1]}")
def test_servers_beside_published_rows(
    row: tuple[str, str, int, int, int, float, float, float, float, float, int],
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The target is a time per token between two published rows, half of all requests keep it.

    A closed loop has always as many in flight. Here users ask at random, and the worst of three
    seeds counts, so one server more is the price of chance.
    """
    name, gpu, gpus, prompt, answer, mean, *times, said = row
    rates = [
        at_once / (ttft_ms + tpot_ms * (mean * answer - 1)) * 1e3
        for at_once, ttft_ms, tpot_ms in ((16, *times[:2]), (32, *times[2:]))
    ]
    target_ms, one_server = sqrt(times[1] * times[3]), sqrt(rates[0] * rates[1])
    users = round(LOAD * one_server * 600)  # each asks every 600 s

    model = name
    if name in LOW_PRECISION and name != "gpt-oss-120b":
        (tmp_path / "config.json").write_text(json.dumps(LOW_PRECISION[name]))
        model = str(tmp_path)
    lengths = [f"uniform:{round((2 * mean - 1) * size)},{size}" for size in (prompt, answer)]
    words = [
        *("size", "--json", "--quick", "--model", model, "--gpu", gpu, "--tp", str(gpus)),
        *("--users", str(users), "--think", "600", "--document-share", "0"),
        *("--document-tokens", "8000", "--chat-tokens", lengths[0]),
        *("--chat-output-tokens", lengths[1], "--slo", f"chat.tpot_p50={target_ms:.2f}ms"),
        *("--max-model-len", str(prompt + answer + 256)),
        *(("--quantization", "fp8") if name == "Llama-3.1-70B" else ()),
    ]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["servers"] == said
