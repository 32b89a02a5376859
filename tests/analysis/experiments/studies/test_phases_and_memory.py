"""Prefill beside decode on the roofline, and memory in pages beside reservations."""

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from study_runs import study

from forebay.analysis.charts.panels import STYLE, Axis, Panel, Series, count_label, document
from forebay.analysis.experiments.result import Column, markdown_table
from forebay.analysis.experiments.server_study import prefill_work
from forebay.replay.engine.hardware.specs import H200_NVL, PHI_3_MINI
from forebay.replay.engine.timing.roofline import least


def test_both_phases_are_on_one_roofline(tmp_path: Path) -> None:
    found = study("phases", tmp_path, "--lengths", "512,4k,8k", "--batches", "1,64")
    facts, rows = found["facts"], found["rows"]
    assert facts["ridge_flop_per_byte"] == pytest.approx(835.5e12 / 4.8e12)
    assert [row["phase"] for row in rows] == ["prefill"] * 3 + ["decode"] * 2
    alone = rows[3]
    assert 0.9 < alone["flop_per_byte"] < 1.1  # 2 FLOP for a weight of 2 bytes
    assert rows[0]["flop_per_byte"] > facts["ridge_flop_per_byte"] > rows[4]["flop_per_byte"]
    assert all(row["peak_share"] < 1 and row["bandwidth_share"] < 1 for row in rows)
    best = max(row["tokens_per_s"] for row in rows[:3])
    assert facts["prefill_to_decode"] == pytest.approx(best / alone["tokens_per_s"])
    assert "The ridge point of h200-nvl is 174 FLOP/byte" in found["sentence"]
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| phase | prompt | batch | tokens/s | ratio |" in page


def test_flops_of_a_prefill_are_two_for_each_weight_and_token() -> None:
    floor = least(PHI_3_MINI, H200_NVL, [prefill_work(512)])
    weights = PHI_3_MINI.parameters - 2 * PHI_3_MINI.vocab * PHI_3_MINI.hidden
    attention = 4 * 32 * 3072 * 512 * 512 / 2
    assert floor.flops == pytest.approx(2 * weights * 512 + attention, rel=0.01)


def test_a_static_batch_waits_for_its_longest_answer(tmp_path: Path) -> None:
    """The share of busy slots is that of batches drawn at random: 1 / H(n), 0.296 of 16."""
    found = study("phases", tmp_path, "--batches", "1,16", "--prompt-tokens", "16")
    *_, alone, batch = found["rows"]
    lengths = np.random.default_rng(0).exponential(256.0, (50_000, 16))
    drawn = lengths.mean() / lengths.max(axis=1).mean()
    assert alone["static_slots"] == 1.0
    assert batch["static_slots"] == pytest.approx(drawn, rel=0.15)
    gain = batch["continuous_tokens_per_s"] / batch["static_tokens_per_s"]
    assert 1.8 < gain < 1 / batch["static_slots"]  # fewer slots make shorter steps
    assert 9 < batch["continuous_tokens_per_s"] / alone["continuous_tokens_per_s"] < 16
    assert "To refill each slot at once gives" in found["sentence"]


def test_pages_save_what_is_not_used(tmp_path: Path) -> None:
    found = study("memory", tmp_path, "--used-tokens", "256", "--max-model-lens", "2k,4k,32k")
    first = found["rows"][0]
    assert first["saved_share"] == 1 - 256 / 2048
    assert first["gain"] == pytest.approx(8, rel=0.01)  # both are whole requests
    assert first["reserved_gib"] == pytest.approx(100 * 2048 * 384 / 1024**2)  # 384 KiB a token
    assert first["matrix_head_gib"] * 1024 == 16  # MiB: 4 bytes of 2,048 squared
    assert first["matrix_gib"] == 16
    assert "(87.5% saved)" in found["sentence"]


def test_saturation_has_a_p95_and_a_p99_where_there_are_enough(tmp_path: Path) -> None:
    words = ("--max-num-seqs", "64", "--concurrency", "8,32,64,256")
    found = study("saturation", tmp_path, *words, "--output-tokens", "20")
    first = found["rows"][0]
    assert first["ttft_s"] <= first["ttft_p95_s"]
    assert first["ttft_p99_s"] is None  # 200 requests
    assert [row["knee"] for row in found["rows"]].count("knee") == 1
    assert "The knee is max_num_seqs itself, 64. With --max-num-seqs 256" in found["sentence"]


def test_the_latency_of_a_load_leaves_its_start_out(tmp_path: Path) -> None:
    """Requests that begin together wait for the prefills of each other, which no later one does."""
    words = ("--concurrency", "1,8,32", "--requests", "1000", "--output-tokens", "40")
    *_, last = study("saturation", tmp_path / "few", *words)["rows"]
    words = (*words[:3], "6000", *words[4:])
    *_, longer = study("saturation", tmp_path / "many", *words)["rows"]
    assert last["steady"] >= 1000
    assert last["ttft_p99_s"] == pytest.approx(longer["ttft_p99_s"], rel=0.1)


def test_the_flags_of_an_engine_act_in_every_study(tmp_path: Path) -> None:
    words = ("--lengths", "32k,64k,96k", "--repeats", "1")
    (*_, alone) = study("prefill", tmp_path / "one", *words)["rows"]
    found = study("prefill", tmp_path / "two", *words, "--tensor-parallel-size", "2")
    assert found["rows"][-1]["ttft_s"] < 0.7 * alone["ttft_s"]
    assert "--tensor-parallel-size 2" in found["command"]
    assert "--block-size" not in found["command"]  # only what was given


def test_an_older_vllm_schedules_in_step(tmp_path: Path) -> None:
    """Asynchronous scheduling hides the CPU's part of a step, which 0.11 shows."""
    words = ("--lengths", "128", "--batches", "1", "--repeats", "1")
    (new,) = study("decode", tmp_path / "new", *words, "--batch-output-tokens", "128")["rows"]
    older = (*words, "--batch-output-tokens", "128", "--vllm-version", "0.11")
    (old,) = study("decode", tmp_path / "old", *older)["rows"]
    assert old["steady_itl_s"] > new["steady_itl_s"] + 0.002


def test_plots_have_plain_colours() -> None:
    """Renderers without CSS variables would draw every mark black."""
    assert "var(" not in STYLE


def test_a_table_is_markdown() -> None:
    columns = (Column("a", "way", "text"), Column("n", "tokens", "count"))
    made = markdown_table(columns, [{"a": "x", "n": 1200}, {"a": "y", "n": None}])
    assert made == "| way | tokens |\n| --- | --: |\n| x | 1,200 |\n| y | – |"


def test_labels_and_notes_of_a_plot_keep_clear() -> None:
    """Labels of the x axis do not lie on each other, nor the note on the curve."""
    roof = [(1.0, 5e12), (174.0, 8.4e14), (2e5, 8.4e14)]
    axis = Axis("max_model_len", count_label)
    panel = Panel([Series("roof", [], roof)], axis, Axis("FLOP/s", count_label), (174.0, "ridge"))
    root = ElementTree.fromstring(document(panel))
    texts = [n for n in root.iter() if n.tag.endswith("text") and n.get("class") != "halo"]
    (note,) = (node for node in texts if node.text == "ridge")
    path = next(node.attrib["d"] for node in root.iter() if "curve" in node.attrib.get("class", ""))
    top_of_roof = min(float(place.split()[1]) for place in path[1:].split("L"))
    assert float(note.attrib["y"]) - 12 > top_of_roof
    narrow = Panel([Series("a", [(2e3, 1.0), (1.28e5, 2.0)])], axis, Axis("b", count_label))
    root = ElementTree.fromstring(document(narrow))
    spans = []
    for node in root.iter():
        if node.tag.endswith("text") and "," in (node.text or ""):
            width, at = 6.5 * len(node.text or ""), float(node.attrib["x"])
            left = at - width if node.attrib["text-anchor"] == "end" else at - width / 2
            spans.append((left, left + width))
    spans.sort()
    assert len(spans) > 3
    assert all(right < left for (_, right), (left, _) in pairwise(spans))
