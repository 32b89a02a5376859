"""replay/results/folder.py: a run whose process is killed keeps the rows so far."""

import asyncio
import shutil
from pathlib import Path

import orjson
import pytest
from commands import remarks

from forebay.analysis.runs.load import load_run
from forebay.replay.results.folder import ROWS, RunFolder
from forebay.replay.results.row import row_with
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

INFO = {"targets": [], "model": "m"}
TIMES = {"ttft_response_s": 0.1, "e2e_response_s": 0.5, "outcome": "ok", "output_tokens": 4}


def killed(tmp_path: Path, rows: int, cut: int = 0) -> Path:
    """Return the files of a run that was killed after `rows` rows, without the last `cut` bytes."""
    left = tmp_path / "left"
    with RunFolder(tmp_path / "run") as folder:
        folder.begin(INFO)
        for number in range(rows):
            request = TraceRequest(f"r{number}", float(number), 32, 4)
            folder.table.add(
                row_with(request, "chat", None, {"intended_s": float(number), **TIMES})
            )
            asyncio.run(folder.table.write_rows())
        shutil.copytree(folder.path, left)
    with open(left / ROWS, "rb+") as file:
        file.truncate((left / ROWS).stat().st_size - cut)
    return left


@pytest.mark.parametrize(("cut", "rows"), [(0, 3), (10, 2)])
def test_a_report_reads_a_run_that_was_killed(cut: int, rows: int, tmp_path: Path) -> None:
    left = killed(tmp_path, 3, cut)
    run = load_run(left)
    assert (run.requests, run.info["model"]) == (rows, "m")
    assert run.summary["verdict"] == "interrupted"
    said = remarks("report", left, "--out", tmp_path / "r.html")
    assert f"it did not finish: {rows} requests had ended" in said
    assert "delays of the client" not in said


def test_without_a_row_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no request had ended"):
        load_run(killed(tmp_path, 0))


def test_an_ended_run_has_no_partial_file(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.begin(INFO)
        folder.commit(INFO, {"requests": 0})
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["latency.hlog", "requests.parquet", "run.json", "summary.json"]
    assert orjson.loads((tmp_path / "run" / "run.json").read_bytes()) == INFO
