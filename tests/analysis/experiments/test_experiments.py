"""The studies of `forebay experiment`, in virtual time and once over HTTP."""

import asyncio
import csv
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from commands import refusal
from study_runs import PHI, study
from typer.testing import CliRunner

from forebay.analysis.experiments.result import FILLED, VARIED, Column, Result, Row, finish
from forebay.analysis.experiments.studies.flood import Flood
from forebay.analysis.experiments.studies.hol import beside_a_chat
from forebay.analysis.experiments.study import Study, command, integers
from forebay.analysis.experiments.target import Ask, SimTarget, StudyFailed, open_target, sim_config
from forebay.analysis.statistics.fitting import fit_terms
from forebay.proxy.cli import main
from forebay.replay.clock.virtual_loop import run
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.server.server import start_engine
from forebay.replay.engine.timing.step_constants import CalibrationFile
from forebay.traces.ground.errors import InputError

EMPTY_PLOT = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"/>'
ADMIT_TOKEN_S = 0.5e-6
"""Seconds outside the engine's steps for each token of a text: the engine takes it in. The products
of this model hold the API server's time."""


@pytest.fixture(scope="module")
def trade_off() -> dict[int, dict[str, Any]]:
    """A chat beside 120,000 tokens on Phi-3-mini, H200 NVL, by chunk size.

    Scheduling is synchronous, as in the vLLM of the published figures.
    """

    def target(size: int) -> SimTarget:
        return SimTarget(
            replace(sim_config(PHI, None, max_num_batched_tokens=size), async_scheduling=False), PHI
        )

    return {
        size: asyncio.run(beside_a_chat(target(size), 120_000)) for size in (131_072, 8_192, 512)
    }


def test_one_big_chunk_stops_a_chat_for_seven_seconds(
    trade_off: dict[int, dict[str, Any]],
) -> None:
    """Published: 6.99 s on Phi-3-mini-128k, H200 NVL."""
    assert trade_off[131_072]["worst_gap_s"] == pytest.approx(6.99, rel=0.01)
    assert trade_off[131_072]["upload_ttft_s"] == pytest.approx(6.99, rel=0.01)


def test_small_chunks_keep_the_chat_going_at_the_uploaders_expense(
    trade_off: dict[int, dict[str, Any]],
) -> None:
    small, big = trade_off[512], trade_off[131_072]
    assert small["worst_gap_s"] <= 0.15
    assert 3 < small["gap_ratio"] < 14  # never "no disruption"
    assert small["upload_ttft_s"] / big["upload_ttft_s"] == pytest.approx(1.26, abs=0.01)
    assert trade_off[8_192]["worst_gap_s"] == pytest.approx(0.78, rel=0.05)


def test_the_same_over_http_in_virtual_time() -> None:
    """The live server and the study's client, on a clock that jumps: the stall is the same."""

    async def live(batched: int) -> dict[str, Any]:
        config = EngineConfig(
            "phi-3-mini", "h200-nvl", max_num_batched_tokens=batched, max_num_seqs=256
        )
        async with start_engine(config) as server, open_target(server.url) as target:
            return await beside_a_chat(target, 30_000)

    big, small = run(live(131_072)), run(live(512))
    simulated = asyncio.run(
        beside_a_chat(SimTarget(sim_config(PHI, None, max_num_batched_tokens=131_072), PHI), 30_000)
    )
    assert big["worst_gap_s"] == pytest.approx(simulated["worst_gap_s"], rel=0.02)
    assert big["upload_ttft_s"] == pytest.approx(simulated["upload_ttft_s"], rel=0.05)
    assert small["worst_gap_s"] < big["worst_gap_s"] / 10


def test_hol_prints_the_trade_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--chunks", "8192,1024,131072", "--prompt-tokens", "60000")
    found = study("hol", tmp_path, *words)
    said = capsys.readouterr().out
    sizes = [row["max_num_batched_tokens"] for row in found["rows"]]
    assert sizes == [131_072, 8_192, 1_024]  # the first is what the others are compared with
    assert found["rows"][0]["upload_ratio"] == 1
    for words_of in ("131,072", "8,192", "A prompt of 60,000 tokens stalls a chat for"):
        assert words_of in " ".join(said.split())
    facts = found["facts"]
    for way in ("round_robin", "proxy"):
        whole, chunked = (facts[f"worst_stall_s.{way}.{how}"] for how in ("whole", "chunked"))
        assert chunked < 0.5 * whole
    assert len(facts["fleet"]) == 8
    assert "with chunked prefill the proxy" in found["sentence"]
    table = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [float(r["worst_gap_s"]) for r in table] == [r["worst_gap_s"] for r in found["rows"]]


def test_hol_stands_where_its_fleet_cannot(tmp_path: Path) -> None:
    """A prompt that just fits an engine leaves no room for a question about it."""
    words = ("--chunks", "8192", "--prompt-tokens", "131050")
    found = study("hol", tmp_path, *words)
    assert len(found["rows"]) == 1
    assert "not measured, with and without the proxy: --prompt-tokens" in found["notes"][0]
    assert "fleet" not in found["facts"]


def test_engines_are_compared_with_their_own_largest_chunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--target", "sim:llama-3-8b@h200", "--chunks", "131072,512")
    found = study("hol", tmp_path, *words, "--prompt-tokens", "30000")
    ratios = [row["upload_ratio"] for row in found["rows"]]
    assert ratios[0] == ratios[2] == 1
    assert all(1 < ratio < 2 for ratio in (ratios[1], ratios[3]))
    said = capsys.readouterr().out
    assert f"{found['rows'][1]['upload_ratio'] - 1:+.0%} TTFT" in " ".join(said.split())
    copied = ("command:", "plot:")  # whole, so that they can be copied
    assert max(len(line) for line in said.splitlines() if not line.startswith(copied)) <= 80


def test_prefill_finds_the_crossover(tmp_path: Path) -> None:
    """36,864 tokens by FLOPs for this model; the shares of peak (.652, .640) move it to 37,600."""
    words = ("--repeats", "1", "--max-num-batched-tokens", "131072")
    found = study("prefill", tmp_path, *words)
    facts = found["facts"]
    in_steps = facts["linear_s_per_token"] - ADMIT_TOKEN_S
    crossover = facts["crossover_tokens"] * in_steps / facts["linear_s_per_token"]
    assert crossover == pytest.approx(36_864 * 0.652 / 0.640, rel=0.08)
    # request_s, answer_s, admit_s and the kernels; asynchronous scheduling hides step_s.
    assert facts["fixed_s"] == pytest.approx(9.7e-3, rel=0.05)
    assert facts["worst_error"] < 0.03
    by_length = {row["prompt_tokens"]: row for row in found["rows"]}
    assert by_length[65_536]["ttft_s"] == pytest.approx(2.4937, rel=0.01)  # published
    assert by_length[128_000]["bound"] == "compute"
    assert 0.6 < by_length[128_000]["peak_share"] < 0.66
    assert by_length[1_024]["bound"] == "overhead"
    assert found["command"].startswith("forebay experiment prefill --")
    assert "--max-num-batched-tokens 131072" in found["command"]
    assert found["versions"]["forebay"]
    root = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    marks = [e for e in root.iter() if (e.get("class") or "").startswith("mark")]
    assert len(marks) == len(found["rows"]) + 1  # and the key


def test_a_simulated_target_takes_the_constants_of_a_fit(tmp_path: Path) -> None:
    """As the help says, it takes the flags of `forebay engine`. A URL runs what it runs."""
    parts = replace(EngineConfig("phi-3-mini", "h200-nvl").calibration_file().constants, step_s=0.1)
    file = tmp_path / "constants.json"
    fitted = CalibrationFile("*", "h200-nvl", "2026-11-29", "a test", "", parts)
    file.write_text(json.dumps(fitted.as_json()))
    words = ("--lengths", "64", "--batches", "1", "--calibration", str(file))
    found = study("decode", tmp_path / "out", *words, "--no-async-scheduling")
    assert found["rows"][0]["steady_itl_s"] > 0.1
    assert "--no-async-scheduling" in found["command"]
    command = ("experiment", "decode", "--target", "http://127.0.0.1:1", *words)
    assert "only for a sim: target" in refusal(*command, "--out", str(tmp_path / "url"))


def test_decode_of_phi_is_bound_by_overhead_at_batch_1(tmp_path: Path) -> None:
    """6.17 ms a token; the weights' read is 26 % of that, so it is not the memory.

    Published: 9.37 ms, with synchronous scheduling
    (tests/replay/engine/timing/test_step_time.py). With asynchronous scheduling the GPU's part,
    3.2 ms, hides behind the CPU's.
    """
    words = ("--repeats", "1", "--lengths", "128,512", "--batches", "1,64")
    found = study("decode", tmp_path, *words)
    first = found["rows"][0]
    assert first["steady_itl_s"] == pytest.approx(6.17e-3, rel=0.01)
    assert first["bandwidth_share"] == pytest.approx(0.265, abs=0.015)
    assert first["bound"] == "overhead"
    assert found["facts"]["s_per_token"] == pytest.approx(6.2e-3, rel=0.01)
    last = found["rows"][-1]
    assert last["batch"] == 64
    assert last["tpot_s"] > last["steady_itl_s"] > first["steady_itl_s"]  # prefills are in TPOT


async def test_a_study_over_http_counts_what_the_server_counts() -> None:
    config = EngineConfig("llama-3-8b", "h200")
    async with start_engine(config) as server, open_target(server.url) as target:
        assert target.about.model is not None
        assert target.about.context == config.context
        first, second = await target.run([Ask("a", 2_000, 12), Ask("b", 300, 5, 0.5)])
        assert (first.prompt_tokens, len(first.events_s)) == (2_000, 12)
        assert (second.prompt_tokens, len(second.events_s)) == (300, 5)
        assert second.events_s[0] > 0.5
        (again,) = await target.run([Ask("a", 2_000, 1)])
        assert again.cached_tokens == 0  # a prompt is never repeated


@pytest.mark.parametrize("held", ["results.json", "results.csv", "plot.svg", "runs/a/run.json"])
def test_results_are_not_overwritten(held: str, tmp_path: Path) -> None:
    """The runs of a study that did not finish stand there without its results."""
    file = tmp_path / held
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine")
    words = ["experiment", "prefill", "--target", PHI, "--lengths", "1k,2k,4k", "--repeats", "1"]
    said = refusal(*words, "--out", str(tmp_path))
    assert f"already holds {held.partition('/')[0]}; name another or give --force" in said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    assert file.read_text() == "mine"
    assert main([*words, "--out", str(tmp_path), "--force"]) == 0


def test_lengths_are_read_as_people_write_them() -> None:
    assert integers("128000, 1k,4096,4k", "--lengths") == [1_024, 4_096, 128_000]
    with pytest.raises(InputError, match="--lengths 1k,,2"):
        integers("1k,,2", "--lengths")


def test_a_fit_has_no_negative_term() -> None:
    terms, worst = fit_terms([1, 2, 4, 8], [1.0, 2.0, 4.0, 8.0], (0, 1, 2))
    assert terms == pytest.approx([0, 1, 0], abs=1e-9)
    assert worst < 1e-9
    terms, _ = fit_terms([1, 2, 3], [3.0, 2.0, 1.0], (0, 1))
    assert terms[1] == 0
    assert terms[0] > 0


def test_a_table_fits_80_columns_and_splits_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        {"load": 10.5, "load_of_proxy": 6.93, "way": way, "goodput_per_s": 123.4,
         "ttft_p50_s": 9.869, "ttft_p99_s": 113.25, "rejected_share": 0.136, "late_share": 1.0}
        for way in ("round robin", "proxy, no limits", "proxy")
    ]  # fmt: skip
    finish(Result("flood", PHI, "So it is.", Flood.COLUMNS, rows, {}, EMPTY_PLOT), tmp_path, False)
    table = capsys.readouterr().out.partition("So it is.")[0]
    assert max(map(len, table.splitlines())) <= 80
    for word in ("load", "proxy", "goodput", "TTFT", "p99", "rejected", "late", "113.250 s"):
        assert f" {word} " in f"{table} "
    assert "round robin" in table
    assert "proxy, no " in table  # the longest name may go on below


@dataclass(kw_only=True)
class Weigh(Study):
    """Weigh each fruit."""

    NAME = "weigh"
    COLUMNS = (
        Column("fruit", "fruit", "text", when=VARIED),
        Column("kg", "kg", "count", when=FILLED),
    )
    SETTINGS = ("fruits",)

    fruits: Annotated[str, typer.Option(help="Fruits.")] = "fig"
    empty: Annotated[bool, typer.Option("--empty", help="Nothing can be weighed.")] = False

    async def loads(self) -> Sequence[str]:
        return self.fruits.split(",")

    async def row(self, load: str) -> Row:
        if load == "stone":
            raise StudyFailed("a stone is no fruit")
        return {"fruit": load, "kg": None if self.empty else len(load)}

    def sentence(self, rows: Sequence[Row]) -> str:
        self.note("one fruit only", when=len(rows) == 1)
        return f"{len(rows)} weighed."

    def plot(self, rows: Sequence[Row]) -> str:
        return EMPTY_PLOT


@pytest.mark.parametrize(
    ("words", "columns", "notes"),
    [
        (("--fruits", "fig,pear"), ["fruit", "kg"], []),
        (("--fruits", "fig,pear", "--empty"), ["fruit"], []),
        ((), ["kg"], ["one fruit only"]),
    ],
)
def test_a_study_needs_loads_rows_and_a_sentence(
    words: tuple[str, ...], columns: list[str], notes: list[str], tmp_path: Path
) -> None:
    runner = CliRunner()
    app = typer.Typer()
    app.command()(command(Weigh))
    out = tmp_path / "out"
    done = runner.invoke(app, ["--target", PHI, "--out", str(out), "--api-key", "hush", *words])
    assert done.exit_code == 0
    found = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [column["key"] for column in found["columns"]] == columns
    assert found["notes"] == notes
    assert "--fruits" in found["command"]
    assert "hush" not in found["command"]
    assert found["fruits"] == ("fig,pear" if words else "fig")
    failed = runner.invoke(app, ["--target", PHI, "--out", str(tmp_path), "--fruits", "stone"])
    assert failed.exit_code == 1
