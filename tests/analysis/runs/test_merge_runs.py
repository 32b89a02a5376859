"""`forebay runs merge`: the merged run has every row and sample of its parts, and no other."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from commands import printed, refusal, remarks

from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.provenance import setting
from forebay.analysis.runs.run import RunData
from forebay.replay.results.row import Row
from forebay.traces.ground.hlog import read_hlog

SEEDS = (1, 2, 3)
START = 1_700_000_000.0


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three simulations of one trace with other gaps."""
    top = tmp_path_factory.mktemp("runs")
    trace = top / "t.jsonl"
    kind = ("chat-beside-documents", "--duration", "40")
    printed("traces", "synth", *kind, "-o", trace, "--quiet")
    made = []
    for seed in SEEDS:
        made.append(top / f"s{seed}")
        words = ("--gpus", "2", "--arrivals", "poisson", "--rate", "8", "--quiet")
        printed("simulate", trace, *words, "--seed", str(seed), "--out", made[-1])
    return made


def copies(seeds: Sequence[Path], into: Path, **changes: Sequence[Any]) -> list[Path]:
    """Copies of the runs, with other values in run.json."""
    made: list[Path] = []
    for number, run in enumerate(seeds):
        made.append(shutil.copytree(run, into / run.name))
        info = json.loads((run / "run.json").read_text())
        info |= {key: values[number] for key, values in changes.items()}
        (made[-1] / "run.json").write_text(json.dumps(info))
    return made


def merged(runs: Sequence[Path], out: Path) -> tuple[RunData, str]:
    """The run that the command made, and its words."""
    said = remarks("runs", "merge", *runs, "--out", out)
    return load_run(out), said


def counts(run: Path) -> dict[str, int]:
    return {
        tag: sum(interval.histogram.total_count for interval in intervals)
        for tag, intervals in read_hlog(run / "latency.hlog").items()
    }


def test_seeds_are_put_one_behind_the_other(seeds: list[Path], tmp_path: Path) -> None:
    whole, said = merged(seeds, tmp_path / "all")
    assert "of 3 runs, one after the other: mean rates" in said
    parts = [load_run(seed) for seed in seeds]
    assert whole.requests == sum(part.requests for part in parts)
    for name in ("ttft_response_s", "tpot_s", "input_tokens", "cached_tokens"):
        of_parts = np.concatenate([part.numbers[name] for part in parts])
        assert np.array_equal(np.sort(whole.numbers[name]), np.sort(of_parts), equal_nan=True)
    sums = [counts(seed) for seed in seeds]
    assert counts(tmp_path / "all") == {
        tag: sum(one.get(tag, 0) for one in sums) for tag in set().union(*sums)
    }
    windows = [part.number("window_s") or 0.0 for part in parts]
    assert whole.number("window_s") == pytest.approx(sum(windows))
    assert whole.number("attainment") == pytest.approx(
        sum((part.number("attainment") or 0.0) * part.requests for part in parts) / whole.requests
    )
    goods = [(part.number("goodput_per_s") or 0.0) for part in parts]
    mean = sum(good * window for good, window in zip(goods, windows, strict=True)) / sum(windows)
    assert whole.number("goodput_per_s") == pytest.approx(mean)
    exact = np.nanquantile(whole.numbers["ttft_response_s"], 0.99, method="inverted_cdf")
    assert (whole.number("ttft_ms", "all", "p99") or 0.0) / 1e3 == pytest.approx(exact, rel=2e-3)
    ends = [np.nanmax(part.numbers["intended_s"]) for part in parts]
    assert np.nanmax(whole.numbers["intended_s"]) > sum(ends[:2]) + ends[2]
    table = pq.read_table(tmp_path / "all" / "requests.parquet")
    assert table.column_names == list(Row.__slots__)
    info = json.loads((tmp_path / "all" / "run.json").read_text())
    assert (info["seed"], [run["seed"] for run in info["merged"]["runs"]]) == (None, list(SEEDS))
    compared = printed("compare", seeds[0], tmp_path / "all", "--json")
    shown = " ".join(json.loads(compared)["warnings"])
    of_all = "; ".join(map(str, SEEDS))
    assert f"different seed: {seeds[0].name} {SEEDS[0]}, all {of_all}; the arrivals differ" in shown
    printed("report", tmp_path / "all", "-o", tmp_path / "r.html", "--quiet")


def test_rates_of_runs_at_once_add_up(seeds: list[Path], tmp_path: Path) -> None:
    runs = copies(seeds, tmp_path, started_unix_s=[START, START + 0.3, START + 0.6])
    whole, said = merged(runs, tmp_path / "all")
    assert "sent at once: rates add up" in said
    parts = [load_run(seed) for seed in seeds]
    windows = [part.number("window_s") or 0.0 for part in parts]
    assert whole.info["rate_per_s"] == sum(part.info["rate_per_s"] for part in parts)
    assert whole.number("window_s") == max(windows)
    good = sum((p.number("goodput_per_s") or 0.0) * w for p, w in zip(parts, windows, strict=True))
    assert whole.number("goodput_per_s") == pytest.approx(good / max(windows))
    latest = max(np.nanmax(part.numbers["intended_s"]) for part in parts)
    assert np.nanmax(whole.numbers["intended_s"]) == latest


def test_merging_in_steps_is_merging_at_once(seeds: list[Path], tmp_path: Path) -> None:
    runs = copies(seeds, tmp_path, started_unix_s=[START, START, START])
    first, _ = merged(runs[:2], tmp_path / "two")
    assert first.requests
    one_by_one, _ = merged([tmp_path / "two", runs[2]], tmp_path / "three")
    whole, _ = merged(runs, tmp_path / "whole")
    left, right = (json.loads((r.path / "summary.json").read_text()) for r in (one_by_one, whole))
    assert left == right
    assert counts(one_by_one.path) == counts(whole.path)
    assert one_by_one.info["merged"]["runs"] == whole.info["merged"]["runs"]
    assert setting(one_by_one, "seed") == sorted(SEEDS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"targets": [[{"url": f"http://{name}"}] for name in "abb"]},
         "targets differs from {0}: http://b and http://a; merge only runs of one target"),
        ({"rate_per_s": [8.0, 9.0, 8.0]}, "s2: rate differs from {0}: 9.0 and 8.0"),
        ({"run_id": ["a", "b", "a"]}, "s3: the same run as {0}; give each once"),
        ({"started_unix_s": [START, START + 10.0, START + 500.0]}, "s1 and s2 overlap in part"),
    ],
)  # fmt: skip
def test_what_does_not_belong_together(
    seeds: list[Path], tmp_path: Path, changes: dict[str, Sequence[Any]], told: str
) -> None:
    runs = copies(seeds, tmp_path, **changes)
    said = refusal("runs", "merge", *runs, "--out", tmp_path / "out")
    assert told.format(runs[0].name) in said
    assert not (tmp_path / "out").exists()


def test_other_mistakes(seeds: list[Path], tmp_path: Path) -> None:
    one, two, out = seeds[0], seeds[1], ("--out", tmp_path / "out")
    (tmp_path / "old").mkdir()
    for words, told in (
        ([one], "give two or more run folders"),
        ([one, one], "the same run as"),
        ([one, tmp_path / "none"], "none: not there; give a run folder"),
    ):
        assert told in refusal("runs", "merge", *words, *out)
    assert "already holds a run" in refusal("runs", "merge", one, two, "--out", one)
    changed = copies(seeds[:1], tmp_path / "x")[0]
    table = pq.read_table(changed / "requests.parquet").drop_columns(["request_id"])
    pq.write_table(table, changed / "requests.parquet")
    said = refusal("runs", "merge", two, changed, *out)
    assert "its columns are those of another version" in said


def test_files_that_are_not_of_the_run(seeds: list[Path], tmp_path: Path) -> None:
    """A log without its samples would make percentiles of half the requests."""
    first, log, short = copies(seeds, tmp_path)
    lines = (seeds[1] / "latency.hlog").read_text().splitlines(keepends=True)
    summary = json.loads((seeds[2] / "summary.json").read_text())
    count = json.loads((seeds[1] / "summary.json").read_text())["ttft_ms"]["all"]["count"]
    for kept in (0, len(lines) - 9):
        (log / "latency.hlog").write_text("".join(lines[:kept]))
        told = refusal("runs", "merge", first, log, "--out", tmp_path / "out")
        assert f"{log}/latency.hlog: has " in told
        assert f"times of a first token, but summary.json counts {count:,}" in told
        assert not list((tmp_path / "out").iterdir())
    del summary["window_s"]
    (short / "summary.json").write_text(json.dumps(summary))
    told = refusal("runs", "merge", first, short, "--out", tmp_path / "out")
    assert f"{short}/summary.json: has no window_s" in told
