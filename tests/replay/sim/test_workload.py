"""How a simulation reads its trace: in one pass, with the rows and errors of a replay's two."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.replay.plan import source as source_module
from forebay.replay.plan.source import TraceSource
from forebay.replay.sim.workload import SimWorkload, with_blocks
from forebay.traces.formats import open_trace
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import write_trace
from forebay.traces.reading.reader import TraceReader

CONTEXT = 1_000
ROWS = [
    TraceRequest("a", 0.0, 600, 0, text="one " * 600),
    TraceRequest("b", 0.5, 2_000, 100, text="two " * 2_000),
    TraceRequest("c", 1.0, 600, 5, blocks=(1, 2)),
    TraceRequest("d", 2.0, 1_500, 900, blocks=(1, 2, 3)),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_trace(tmp_path / "trace.jsonl", ROWS)
    return tmp_path / "trace.jsonl"


def no_load(_: Sequence[TraceRequest]) -> float:
    raise AssertionError("the pace is the trace's own")


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_a_file_is_read_once_for_the_rows_of_two_passes(
    trace: Path, too_long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_passes = TraceSource(trace, max_model_len=CONTEXT, too_long=too_long)
    two_passes.scan()
    rows = [with_blocks(row) for row in two_passes.requests()]
    opened: list[Path] = []

    def opening(path: Path, *, format_name: str | None, skip_bad: bool) -> TraceReader:
        opened.append(path)
        return open_trace(path, format_name=format_name, skip_bad=skip_bad)

    monkeypatch.setattr(source_module, "open_trace", opening)
    requests, _ = SimWorkload(trace, too_long=too_long).requests(CONTEXT, no_load)
    assert requests == rows
    assert opened == [trace]
    SimWorkload(trace, too_long=too_long, load=0.5).requests(CONTEXT, len)
    assert opened == [trace] * 2


def test_a_row_that_is_too_long_is_named(trace: Path) -> None:
    with pytest.raises(InputError, match=r"row 2 \(id 'b'\) needs 2000 \+ 100 tokens"):
        SimWorkload(trace).requests(CONTEXT, no_load)


def test_only_rows_whose_time_changes_are_copied() -> None:
    rows = [replace(row, input_tokens=100, text=None, blocks=None) for row in ROWS[1:]]
    paced, _ = SimWorkload(rows, speed=2.0).requests(CONTEXT, no_load)
    assert [row.arrival_s for row in paced] == [0.0, 0.25, 0.75]
    assert [row.arrival_s for row in rows] == [0.5, 1.0, 2.0]  # other cases share them
    own, _ = SimWorkload(paced).requests(CONTEXT, no_load)
    assert all(one is row for one, row in zip(own, paced, strict=True))


def test_a_simulation_loads_no_http_client(trace: Path) -> None:
    code = (
        "import sys\nfrom forebay.proxy.cli import main\n"
        f"sys.argv = ['forebay', 'simulate', {str(trace)!r}, '--too-long', 'drop', '--json']\n"
        "assert not main()\n"
        "assert 'forebay.replay.sim.sweep' in sys.modules and 'aiohttp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
