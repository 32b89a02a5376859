"""`forebay runs export`: CSV, .hgrm, the JSON of `vllm bench serve`, and formats of packages."""

import csv
import gzip
import io
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import BinaryIO

import orjson
import pytest
from commands import printed, refusal
from ports import free_ports
from stages.replay_server import Server, rows, run_one

from forebay.analysis.runs import exporters
from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.other_tools import load_result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run_one(tmp_path / "run", rows(60), Server(first_s=0.03, gap_s=0.01))
    return tmp_path / "run"


def test_csv_has_every_request_and_column(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "requests.csv"
    printed("runs", "export", "csv", folder, "-o", out)
    read = list(csv.DictReader(io.StringIO(out.read_text())))
    assert len(read) == 60
    assert float(read[7]["ttft_response_s"]) == pytest.approx(0.03)
    assert read[7]["outcome"] == "ok"


def test_json_says_what_was_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "requests.csv")
    words = ("runs", "export", "csv", folder, "--json")
    told = {"format": "csv", "run": str(folder)}
    assert orjson.loads(printed(*words, "-o", out)) == {**told, "path": out}
    said = refusal(*words)
    assert "--json: standard output has the export already; give -o FILE" in said

    def sent(run: Path, out: BinaryIO, tag: str) -> None:
        out.write(b"http://collector 60 metrics\n")

    monkeypatch.setattr(exporters, "export_otlp", sent)
    told = {"format": "otlp", "run": str(folder), "sent_to": "http://collector 60 metrics"}
    assert orjson.loads(printed("runs", "export", "otlp", folder, "--json")) == told


def test_hgrm_has_the_percentiles_of_the_log(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "ttft.hgrm"
    printed("runs", "export", "hgrm", folder, "-o", out)
    lines = out.read_text().splitlines()
    assert lines[0].split() == ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"]
    value, percentile, count = lines[2].split()[:3]
    assert float(value) == pytest.approx(30, rel=1e-3)
    assert (float(percentile), int(count)) == (0.0, 60)


def test_a_tag_that_is_not_in_the_log(folder: Path) -> None:
    said = refusal("runs", "export", "hgrm", folder, "--tag", "nothing")
    assert "ttft_response.chat" in said


def test_vllm_bench_there_and_back(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    printed("runs", "export", "vllm-bench", folder, "-o", out)
    told = orjson.loads(out.read_bytes())
    assert (told["completed"], told["failed"], told["num_prompts"]) == (60, 0, 60)
    assert told["median_ttft_ms"] == pytest.approx(30, rel=1e-3)
    assert told["total_output_tokens"] == 240
    assert len(told["itls"][0]) == 3
    own, read = load_run(folder), load_result(out)
    for column in ("ttft_response_s", "e2e_response_s", "tpot_s", "intended_s"):
        assert sorted(read.numbers[column]) == pytest.approx(sorted(own.numbers[column]), abs=1e-9)
    assert read.number("attainment") == own.number("attainment")


def test_a_file_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "requests.csv"
    out.write_text("mine")
    words = ("runs", "export", "csv", folder, "-o", out)
    assert "--force" in refusal(*words)
    assert out.read_text() == "mine"
    printed(*words, "--force")


def made_up(run: Path, out: BinaryIO, tag: str) -> None:
    out.write(f"{run.name} {tag}".encode())


def test_a_package_adds_a_format(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fake(EntryPoint):
        def load(self) -> object:
            if self.name == "broken":
                raise ImportError("no module")
            return made_up

    points: list[EntryPoint] = [Fake(name, "x:y", exporters.GROUP) for name in ("mine", "broken")]
    asked: list[str] = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return points

    monkeypatch.setattr(exporters, "entry_points", entry_points)
    out = tmp_path / "mine.txt"
    printed("runs", "export", "mine", folder, "-o", out, "--tag", "t")
    assert out.read_text() == "run t"
    assert asked == ["forebay.exporters"]
    assert "cannot be loaded (no module)" in refusal("runs", "export", "broken", folder)
    printed("runs", "export", "csv", folder, "-o", tmp_path / "r.csv")
    said = refusal("runs", "export", "nothing", folder)
    assert "broken, csv, hgrm, mine, otlp, vllm-bench" in said


def test_otlp_gauges_reach_a_collector(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'forebay[otel]'")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        assert url in printed("runs", "export", "otlp", folder)
        server.shutdown()
    assert received[0][0] == "/v1/metrics"
    told = ExportMetricsServiceRequest.FromString(received[0][1])
    found = {
        (metric.name, attributes["figure"]): point.as_double
        for metric in told.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.gauge.data_points
        for attributes in [
            {attribute.key: attribute.value.string_value for attribute in point.attributes}
        ]
    }
    assert found["forebay.run.requests", ""] == 60
    assert found["forebay.run.ttft_ms", "chat.p90"] == pytest.approx(30, rel=1e-3)


def test_a_collector_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="pip install 'forebay[otel]'")
    monkeypatch.setattr("forebay.analysis.runs.otlp.TIMEOUT_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    said = refusal("runs", "export", "otlp", folder)
    assert "took no metrics; set OTEL_EXPORTER_OTLP_ENDPOINT" in said


def test_a_library_that_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    said = refusal("runs", "export", "otlp", folder)
    assert "is not installed; pip install 'forebay[" in said
