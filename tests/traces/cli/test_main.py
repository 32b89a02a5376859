"""The `traces` commands: exit status, output and errors, and no file overwritten unasked."""

import errno
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from commands import forebay, printed, refusal, remarks
from paths import DATA, SHARED, TESTS

from forebay.traces.reading.jsonl import read_trace

AZURE = str(DATA / "traces_azure_2023.csv")
GOLDEN = TESTS / "traces" / "golden"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")


def test_import_then_describe(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    run = forebay("traces", "import", "mooncake", DATA / "traces_mooncake.jsonl", "-o", out)
    assert (run.returncode, run.stdout) == (0, "")
    assert run.stderr == f"4 requests, 2,637 input and 993 output tokens over 6.0 s -> {out}\n"
    assert out.read_bytes() == (DATA / "traces_mooncake.imported.jsonl").read_bytes()
    meta = json.loads(Path(f"{out}.meta.json").read_bytes())
    assert (meta["format"], meta["requests"], meta["skipped"]) == ("mooncake", 4, 0)

    found = json.loads(printed("traces", "describe", out, "--json"))
    raw = json.loads(printed("traces", "describe", DATA / "traces_mooncake.jsonl", "--json"))
    assert found == raw
    wanted = {"requests", "duration_s", "rate_per_s", "interarrival_cv", "input_tokens"}
    assert wanted | {"output_tokens", "ideal_hit_ratio", "sessions", "documents"} <= set(found)
    assert set(found["input_tokens"]) == {"mean", "p50", "p90", "p99", "max"}
    assert found["requests"] == 4
    assert found["ideal_hit_ratio"] == 512 / 2_637

    table = forebay("traces", "describe", out)
    assert (table.returncode, table.stderr) == (0, "")
    assert f"{out}: 4 requests" in table.stdout
    assert "ideal prefix hit ratio" in table.stdout


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    words = ("traces", "import", "azure", AZURE, "-o", out)
    printed(*words)
    out.write_bytes(b"precious")
    said = refusal(*words)
    assert said == f"forebay traces: {out}: already exists; name another file or add --force"
    assert out.read_bytes() == b"precious"
    for command in (
        ("synth", "documents", "-o", out),
        ("synth", "shared-document", "-o", out),
        ("synth", "chat-beside-documents", "-o", out),
        ("synth", "agent-sessions", "-o", out),
        ("needle", "-o", out),
        ("zeroscrolls", DATA, "-o", out),
    ):
        refusal("traces", *command)
        assert out.read_bytes() == b"precious"
    printed(*words, "--force")
    assert len(list(read_trace(out))) == 3


def test_a_bad_row_stops_the_import_and_leaves_nothing_behind(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_bytes((DATA / "traces_mooncake.jsonl").read_bytes() + b'{"timestamp": "soon"}\n')
    out = tmp_path / "t.jsonl"
    words = ("traces", "import", "mooncake", raw, "-o", out)
    said = refusal(*words)
    assert said == f"forebay traces: {raw}:5: timestamp: 'soon' is not a time of 0 or more"
    assert [path.name for path in tmp_path.iterdir()] == ["raw.jsonl"]
    assert "1 bad rows skipped" in remarks(*words, "--skip-bad")
    assert "1 bad rows skipped" in remarks("traces", "describe", raw, "--skip-bad", "--json")


def test_traces_flow_through_pipes() -> None:
    traces = [sys.executable, "-m", "forebay.proxy", "traces"]
    made = subprocess.run(
        [*traces, "synth", "shared-document", "--users", "5", "-o", "-"],
        check=True,
        capture_output=True,
    )
    told = subprocess.run(
        [*traces, "describe", "-", "--json"], input=made.stdout, check=True, capture_output=True
    )
    assert json.loads(told.stdout)["requests"] == 5
    raw = (DATA / "traces_azure_2023.csv").read_bytes()
    told = subprocess.run(
        [*traces, "describe", "-", "--json"], input=raw, check=True, capture_output=True
    )
    assert json.loads(told.stdout)["requests"] == 3


@pytest.mark.parametrize(
    "kind", ["documents", "shared-document", "chat-beside-documents", "agent-sessions"]
)
def test_results_are_not_taken_for_parameters(kind: str, tmp_path: Path) -> None:
    """`requests` and `output_tokens` are names of both."""
    out = tmp_path / "t.jsonl"
    facts = json.loads(printed("traces", "synth", kind, "-o", out, "--seed", "3", "--json"))
    assert facts == json.loads(Path(f"{out}.meta.json").read_bytes())
    assert (facts["kind"], facts["parameters"]["seed"]) == (kind, 3)
    rows = list(read_trace(out))
    assert [facts[key] for key in ("requests", "input_tokens", "output_tokens")] == [
        len(rows), sum(row.input_tokens for row in rows), sum(row.output_tokens for row in rows),
    ]  # fmt: skip
    assert facts["parameters"]["output_tokens"]


class SmallDisk(io.FileIO):
    """A file on a disk that has `room` bytes for all files together."""

    room = 0

    def write(self, data: Any, /) -> int:
        if len(data) > SmallDisk.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        SmallDisk.room -= len(data)
        return super().write(data)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "line",
    [
        "synth documents --requests 9",
        f"import azure {AZURE}",
        f"edit {AZURE} --first 9",
        f"export csv {AZURE}",
        f"fit {AZURE}",
        "needle --lengths 512 --tokens estimate",
    ],
)
def test_a_full_disk_leaves_nothing_behind(
    line: str,
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One byte is missing for the last of the files: not even the first one appears."""
    words = ("traces", *line.split(), "-o", str(tmp_path / "t"))
    printed(*words)
    whole = sum(path.stat().st_size for path in tmp_path.iterdir())
    for path in tmp_path.iterdir():
        path.write_bytes(b"old")
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(SmallDisk, "room", int((whole - 1) * share))
    monkeypatch.setattr(
        "forebay.traces.ground.whole_file.open",
        lambda path, mode, buffering: io.BufferedWriter(SmallDisk(path, "w")),
        raising=False,
    )
    said = refusal(*words, "--force")
    assert said.endswith(": cannot be written (No space left on device)")
    assert set(tmp_path.iterdir()) == before
    assert {path.read_bytes() for path in before} == {b"old"}


def test_a_folder_is_read_or_one_line_says_what_to_give(tmp_path: Path) -> None:
    """Auto looks at the files of the folder itself, a named format also further down."""
    clients = tmp_path / "sets" / "model"
    clients.mkdir(parents=True)
    for file in (GOLDEN / "servegen").iterdir():
        (clients / file.name).write_bytes(file.read_bytes())
    printed("traces", "import", "auto", clients)
    printed("traces", "import", "servegen", clients.parent)
    assert refusal("traces", "import", "auto", clients.parent) == (
        f"forebay traces: {clients.parent}: no folder that auto knows by its files; give one file "
        "of it, or the name of its format (kv-cache-tester or servegen) in place of auto"
    )


def test_needles_have_their_answers_beside_them(tmp_path: Path) -> None:
    out = tmp_path / "n.jsonl"
    printed("traces", "needle", "-o", out, "--lengths", "512,1024", "--tokens", "estimate")
    lines = Path(f"{out}.answers.jsonl").read_bytes().splitlines()
    answers = {line["id"]: line["answer"] for line in map(orjson.loads, lines)}
    requests = list(read_trace(out))
    assert [request.id for request in requests] == list(answers)
    assert all(answers[request.id] in (request.text or "") for request in requests)


@needs_data
def test_zeroscrolls_records_what_it_read(tmp_path: Path) -> None:
    out = tmp_path / "z.jsonl"
    fixture = SHARED / "data" / "zero_scrolls_fixture" / "squality.zip"
    words = ("--order", "shuffled", "--tokens", "estimate", "-o", out)
    run = forebay("traces", "zeroscrolls", fixture, *words, "--json")
    assert run.returncode == 0
    assert "warning: " in run.stderr
    assert "10 rows, the paper's Table 1 has 260" in run.stderr
    assert "tokens counted by estimate of bytes/4" in run.stderr
    facts = json.loads(run.stdout)
    assert len(facts["sources"][0]["sha256"]) == 64
    assert (facts["sources"][0]["rows"], facts["documents"], facts["order"]) == (10, 2, "shuffled")
    assert facts["ideal_hit_ratio"] == pytest.approx(0.8, abs=0.02)
    found = json.loads(printed("traces", "describe", out, "--json"))
    assert found["ideal_hit_ratio"] == facts["ideal_hit_ratio"]
    assert found["documents"] == 2
