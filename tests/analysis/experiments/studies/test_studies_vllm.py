"""The studies against a real vLLM on the CPU: the metrics they read exist and mean the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from study_runs import study
from vllm_server import ModelSize, needed_vllm_python, vllm_server, write_model

SEATS = 6
pytestmark = pytest.mark.timeout(400)  # vLLM loads first


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = needed_vllm_python()
    folder = tmp_path_factory.mktemp("studies")
    write_model(folder / "tiny", ModelSize())
    flags = (
        *("--max-num-seqs", str(SEATS), "--max-num-batched-tokens", "2048"),
        *("--max-model-len", "4096", "--kv-cache-memory-bytes", "4608K"),
    )
    with vllm_server(python, folder / "tiny", folder / "vllm.log", *flags) as running:
        yield running


def test_the_seats_of_a_real_vllm_are_inferred(url: str, tmp_path: Path) -> None:
    words = ("--concurrency", "2,12,24", "--prompt-tokens", "256", "--output-tokens", "32")
    found = study("saturation", tmp_path, *words, target=url)
    assert found["facts"]["max_num_seqs"] == SEATS
    assert [row["running"] for row in found["rows"]][-2:] == [SEATS, SEATS]
    # No verdict is asked for: client and engine share these cores, and may keep each other waiting.


def test_one_pays_for_a_document_on_a_real_vllm(url: str, tmp_path: Path) -> None:
    words = ("--users", "8", "--document-tokens", "2048", "--output-tokens", "64")
    found = study("shared-document", tmp_path, *words, target=url)
    assert [row["cold"] for row in found["rows"]] == [1, 0, 0, 1]
    assert found["facts"]["hit_ratio_of_the_others"] > 0.95
    of = {row["phase"]: row["kv_tokens"] for row in found["rows"]}
    assert of["the others"] < 1.5 * (2_048 + 128)  # one copy, not SEATS of them


def test_the_kv_cache_of_a_real_vllm_fills_as_predicted(url: str, tmp_path: Path) -> None:
    found = study("kv", tmp_path, "--prompt-tokens", "2800", "--output-tokens", "300", target=url)
    facts, rows = found["facts"], found["rows"]
    assert facts["predicted_full_at"] == 4
    assert facts["reported_full_at"] in (4, 5)  # of four, one may be done before the last begins
    assert rows[0]["reported_share"] == pytest.approx(rows[0]["predicted_share"], abs=0.02)
    assert rows[-1]["reported_share"] > 0.9
    assert rows[-1]["running"] == 4
    assert rows[-1]["waiting"] == 1
    assert any("was not predicted" in note for note in found["notes"])


def test_a_real_model_is_judged_by_its_answers(url: str, tmp_path: Path) -> None:
    """With random weights it finds nothing; that its prompts are whole is the tokenizer's word."""
    found = study("needle", tmp_path, "--lengths", "1k", "--depths", "0,1", target=url)
    assert not found["facts"]["simulated"]
    assert found["facts"]["right"] == 0
    assert found["facts"]["arrived_whole"] == 2
    assert found["sentence"].startswith("0 of 2 answers were right (0%)")
