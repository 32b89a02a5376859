"""A real `vllm serve` on the CPU with the class, beside the same without it. Times as ratios."""

import urllib.request
from dataclasses import astuple
from pathlib import Path

import pytest
from vllm_pauses import Answer, draw_asks, figures_of, log_of, play, scheduler_flags
from vllm_server import ModelSize, needed_vllm_python, vllm_server, write_model

pytestmark = pytest.mark.timeout(600)
SIZE = ModelSize(hidden=128, layers=4, heads=4, kv_heads=2, ffn=512)
FLAGS = ("--max-num-batched-tokens", "2048", "--max-num-seqs", "64", "--max-model-len", "16384",
         "--num-gpu-blocks-override", "2000")  # fmt: skip
METRICS = ("step_bound_seconds", "longest_step_seconds", "passed_over", "faults")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    write_model(folder, SIZE)
    return folder


def test_chats_do_not_wait_for_long_prompts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They get the same answers, and the engine's metrics and log tell of the class."""
    asks = draw_asks(1, seconds=6.0, chats=12, documents=3, tokens=14_000)
    answers: dict[str, list[Answer]] = {}
    python, metrics = needed_vllm_python(), ""
    (tmp_path / "metrics").mkdir()
    for way, flags in (("own", ()), ("class", scheduler_flags(0.1))):
        log = tmp_path / f"{way}.log"
        if flags:
            monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "metrics"))
        with vllm_server(python, model, log, *FLAGS, *flags) as url:
            play(url, draw_asks(2, seconds=0.5, chats=2, documents=1, tokens=2_000), "warm-up")
            answers[way] = play(url, asks, "measured")
            with urllib.request.urlopen(f"{url}/metrics") as response:
                metrics = response.read().decode()
    own, with_class = figures_of(answers["own"]), figures_of(answers["class"])
    with capsys.disabled():
        print(f"\nvLLM's own scheduler: {own}\nwith the class: {with_class}")
    assert log_of(tmp_path / "class.log", "Forebay schedules this engine: pauses of at most 0.1 s")
    for name in METRICS:
        assert f'forebay_scheduler_{name}{{engine="0"}}' in metrics
    assert 'forebay_scheduler_faults{engine="0"} 0.0' in metrics
    # On a quiet machine a seventh and a tenth. Documents wait for chats, but not for long.
    assert with_class.chat_p50 < own.chat_p50 / 2
    assert with_class.chat_p90 < own.chat_p90 / 2
    assert with_class.document_max < 3 * own.document_max
    assert all(seconds > 0 for seconds in astuple(with_class))
    assert [a.text for a in answers["class"]] == [a.text for a in answers["own"]]


def test_a_bad_pause_ends_the_start_with_one_line(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    flags = (*scheduler_flags(0.0), *FLAGS)
    with (
        pytest.raises(RuntimeError, match="has ended"),
        vllm_server(needed_vllm_python(), model, log, *flags),
    ):
        pass
    told = log_of(log, "ValueError: --additional-config")
    assert told.endswith('"forebay": pause is 0.0; give seconds between 0.001 and 60')
