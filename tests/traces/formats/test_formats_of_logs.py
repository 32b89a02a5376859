"""Logs of gateways: access logs with and without lengths, and rejected requests in spend logs."""

import json
from pathlib import Path

from commands import imported, refusal
from paths import TESTS

from forebay.traces.formats import ReadOptions, detect, open_trace
from forebay.traces.ground.schema import TraceRequest

COMBINED = '10.0.0.9 - {} [24/Nov/2026:02:47:{:02} +0000] "POST {} HTTP/1.1" {} {} "-" "curl/8"'
CHAT = "/v1/chat/completions"
HAPROXY = (
    "Feb  6 12:14:14 host haproxy[14389]: 10.0.1.2:33317 [06/Feb/2026:12:14:14.655] http-in "
    'static/srv1 10/0/30/69/109 200 2750 - - ---- 1/1/1/1/0 0/0 "POST /v1/chat/completions"'
)
INGRESS = " {} {} [llm-vllm-8000] [] 10.0.0.1:8000 2300 1.500 200 5d41402abc4b2a76"


def told(rows: list[TraceRequest]) -> list[tuple[float, int, int, int | None]]:
    return [(row.arrival_s, row.input_tokens, row.output_tokens, row.status) for row in rows]


WANTED = [(0.0, 1000, 10, 200), (0.5, 250, 575, 200), (1.5, 200, 0, 429)]


def test_nginx_with_lengths_times_and_types(tmp_path: Path) -> None:
    """An event of a stream is about 230 bytes and one token; other answers have 4 bytes a token."""
    stream, whole = "text/event-stream; charset=utf-8", "application/json"
    rows = [
        (5, CHAT, 200, 2300, 4000, "3.000", stream),
        (6, CHAT, 429, 190, 800, "2.500", whole),
        (7, CHAT, 200, 2300, 1000, "4.500", whole),
        (8, "/health", 200, 2, 90, "0", "-"),
    ]
    path = tmp_path / "access.log"
    path.write_text(
        "".join(
            f"{COMBINED.format('acme', at, url, status, sent)} request_length={received} "
            f"request_time={took} content_type={kind}\n"
            for at, url, status, sent, received, took, kind in rows
        )
    )
    found, said = imported(path)
    assert told(found) == WANTED
    assert {one.tenant for one in found} == {"acme"}
    assert "not requests: 1 POST /health" in said
    assert "note:" not in said


def test_nginx_as_json(tmp_path: Path) -> None:
    rows = [(5, 200, 2300, 4000, "3.000", "text/event-stream"), (6, 429, 190, 800, "2.500", ""),
            (7, 200, 2300, 1000, "4.500", "application/json")]  # fmt: skip
    path = tmp_path / "access.json"
    for named in ("request_uri", "request"):
        lines = [
            json.dumps(
                {"time_iso8601": f"2026-11-24T02:47:{at:02}+00:00", "request_method": "POST",
                 named: CHAT if named == "request_uri" else f"POST {CHAT} HTTP/1.1",
                 "status": str(status), "body_bytes_sent": str(sent),
                 "request_length": str(received), "request_time": took,
                 "content_type": "application/json",  # of the request
                 "sent_http_content_type": kind}
            )
            for at, status, sent, received, took, kind in rows
        ]  # fmt: skip
        path.write_text("\n".join(lines))
        assert detect(path) == "nginx"
        found, _ = imported(path)
        assert told(found) == WANTED


def test_ingress_nginx_has_lengths_and_times_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "ingress.log"
    path.write_text(
        COMBINED.format("-", 7, CHAT, 200, 400) + INGRESS.format(2000, "1.500") + "\n"
        + COMBINED.format("-", 8, CHAT, 200, 400) + INGRESS.format(4000, "0.250") + "\n"
    )  # fmt: skip
    found, said = imported(path)
    assert told(found) == [(0.0, 500, 100, 200), (2.25, 1000, 100, 200)]
    assert "note: 2 lines without content_type: answers are taken" in said


def test_nginx_without_lengths_needs_them_and_says_what_else_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "plain.log"
    path.write_text("".join(COMBINED.format("-", at, CHAT, 200, 9) + "\n" for at in (5, 7)))
    assert "give --input-tokens for all rows" in refusal("traces", "import", "auto", path)
    found, said = imported(path, "--input-tokens", "600", "--output-tokens", "80")
    assert told(found) == [(0.0, 600, 80, 200), (2.0, 600, 80, 200)]
    assert "note: 2 lines without request_time, whose arrival is the time of their end" in said


def test_rejected_requests_without_a_length_are_arrivals(tmp_path: Path) -> None:
    """LiteLLM writes 0 tokens for them, and no messages unless it is told to store prompts."""
    start = {"call_type": "acompletion", "model": "llama", "messages": {}, "response": {}}
    rows = [
        {**start, "request_id": "a", "startTime": "2026-11-24 10:00:00", "prompt_tokens": 0,
         "completion_tokens": 0, "status": "failure"},
        {**start, "request_id": "b", "startTime": "2026-11-24 10:00:01", "prompt_tokens": 40,
         "completion_tokens": 9, "status": "success", "trace_id": "t"},
        {**start, "request_id": "c", "startTime": "2026-11-24 10:00:03", "prompt_tokens": 0,
         "completion_tokens": 0, "status": "failure",
         "metadata": {"error_information": {"error_code": "429"}}},
    ]  # fmt: skip
    path = tmp_path / "spend.json"
    path.write_text(json.dumps(rows, indent=1))
    found, said = imported(path)
    assert told(found) == [(0.0, 1, 0, 500), (1.0, 40, 9, None), (3.0, 40, 0, 429)]
    assert found[1].session == "t"
    assert "note: 2 failed requests without a prompt length, which got that of the row" in said


def test_a_failed_request_of_aiperf_has_its_length_under_another_name(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    row = {
        "metadata": {"x_request_id": "r", "request_start_ns": 10**18, "conversation_id": "c"},
        "metrics": {"error_isl": {"value": 70, "unit": "tokens"}},
        "error": {"code": 429},
    }
    path.write_text(json.dumps(row))
    assert told(list(open_trace(path, options=ReadOptions()))) == [(0.0, 70, 0, 429)]


def test_logs_without_lengths_say_so(tmp_path: Path) -> None:
    path, out = tmp_path / "access.log", str(tmp_path / "out.jsonl")
    new = json.loads((TESTS / "traces/golden/caddy.log").read_text().splitlines()[0])
    old = {key: value for key, value in new.items() if key != "bytes_read"}
    for line, told_name in ((json.dumps(old), "Caddy"), (HAPROXY, "HAProxy")):
        path.write_text(f"{line}\n")
        said = refusal("traces", "import", "auto", path, "-o", out)
        assert f"a log of {told_name}, which holds no lengths of prompts; " in said
    # The line that the error proposes for HAProxy is read.
    line = said[said.index("{") :].strip()
    values = {"%Ts.%ms": "1770380054.655", "%HM": "POST", "%HP": CHAT, "%ST": "200",
              "%U": "4200", "%B": "160"}  # fmt: skip
    for name, value in values.items():
        line = line.replace(name, value)
    path.write_text(f"{line}\n")
    found, _ = imported(path)
    assert told(found) == [(0.0, 1050, 40, 200)]
