"""Read the proxy's usage ledger, or its request log in JSON, as a run of production traffic.

Times count from when a request arrived at the proxy. The line of a request is written when it ends,
so it arrived that much earlier. Lines about other events are passed over.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from forebay.analysis.runs.run import RunData
from forebay.analysis.runs.sources.rows import FileRow, Origin, run_of_rows
from forebay.replay.send.http.outcome import is_admission
from forebay.traces.errors import InputError

DIFFERS = {
    "ttft": "from arrival at the proxy",
    "e2e": "from arrival at the proxy to the last byte",
    "tpot": "(last byte - first event) / (output tokens - 1)",
}
LEDGER = Origin(
    "usage ledger", DIFFERS, ("it lacks requests that reached no server, such as rejections",), True
)
REQUEST_LOG = Origin(
    "request log",
    DIFFERS,
    (
        "it has the share logs.sample of the requests, or all at debug",
        "requests of paths that are not shaped, such as embeddings, are left out",
    ),
    True,
)


def load_proxy_log(path: Path, name: str | None, lines: Sequence[Any]) -> RunData:
    """Make a run of the lines of a ledger or a request log; raises InputError."""
    requests = [line for line in lines if is_request(line)]
    origin = REQUEST_LOG if "event" in requests[0] else LEDGER
    rows = []
    for number, line in enumerate(requests, 1):
        try:
            rows.append(_row(line))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: request {number} is damaged ({error!r})") from error
    return run_of_rows(path, name, origin, rows)


def is_request(line: Any) -> bool:
    """True if a line is one request of either file."""
    if not isinstance(line, Mapping) or not {"time", "request_id", "status"} <= line.keys():
        return False
    if line.get("operation") == "other":  # not shaped, such as an embedding or a list of models
        return False
    return line.get("event", "request") == "request" and "duration_ms" in line


def _row(line: Mapping[str, Any]) -> FileRow:
    took_s = float(line["duration_ms"]) / 1e3
    due_s = datetime.fromisoformat(line["time"]).timestamp() - took_s
    status, ok = int(line["status"]), line["status"] == 200 and not line.get("reason")
    ttft_s, queue_ms = _seconds(line.get("ttft_ms")), line.get("queue_ms")
    output, reason = line.get("output_tokens"), line.get("reason") or ""
    rejected = is_admission(status, reason)
    streamed = ok and ttft_s is not None and output is not None and output > 1
    return {
        "bucket": line.get("bucket") or "other",
        "outcome": "ok" if ok else "rejected" if rejected else "failed",
        "reason": None if ok else reason or _reason(status),
        "backend": line.get("backend"),
        "tenant": line.get("tenant"),
        "request_id": line["request_id"],
        "input_tokens": line.get("prompt_tokens"),
        "prompt_tokens": line.get("prompt_tokens") if ok else None,
        "cached_tokens": line.get("cached_tokens") if ok else None,
        "output_tokens": output if ok else None,
        "intended_s": due_s,
        "sent_s": due_s,
        "ttft_response_s": ttft_s if ok else None,
        "ttft_service_s": ttft_s if ok else None,
        "e2e_response_s": took_s if ok else None,
        "tpot_s": (took_s - float(ttft_s or 0.0)) / (output - 1) if streamed and output else None,
        "queue_ms": queue_ms,
        "status": status,
        "reject_latency_s": None if ok else took_s,
    }


def _reason(status: int) -> str:
    if status == 499:
        return "cancelled"
    return "stream_error" if status == 200 else f"{status // 100}xx"


def _seconds(value_ms: Any) -> float | None:
    return None if value_ms is None else float(value_ms) / 1e3


def json_lines(path: Path, raw: bytes) -> list[Any]:
    """Parse a file of one JSON value a line; a torn last line of a file still written is left out.

    Raises:
        InputError: another line is no JSON.
    """
    lines: list[Any] = []
    texts = raw.split(b"\n")
    for number, line in enumerate(texts, 1):
        if not line.strip():
            continue
        try:
            lines.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            if number == len(texts) and lines:
                break
            raise InputError(f"{path}:{number}: not JSON ({error})") from error
    return lines
