"""The usage ledger and the capture that the proxy would have written of a simulated hour."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from unittest.mock import patch

from forebay.proxy.telemetry.logs import usage_ledger
from forebay.proxy.telemetry.logs.capture import Rows
from forebay.proxy.telemetry.record import RequestRecord
from forebay.replay.sim.fleet import SimOutcome, proxy_request
from forebay.traces.ground.trace_line import row_bytes

STARTED_S = 1_796_000_000.0
"""Unix time of the first second."""
SALT = b"0123456789abcdef"


def write_hour(folder: Path, outcomes: Sequence[SimOutcome]) -> tuple[Path, Path]:
    """Write `usage.jsonl` and `traffic.jsonl` with the proxy's own code, and return both."""
    ledger, capture = folder / "usage.jsonl", folder / "traffic.jsonl"
    records = [(_record(outcome), outcome) for outcome in outcomes]
    rows = Rows(SALT, 512, 1.0)
    for record, _ in records:
        rows.started(record)
    with ledger.open("wb") as lines, capture.open("wb") as prompts:
        for record, outcome in sorted(records, key=lambda pair: pair[1].finished_s or 0.0):
            for due in rows.finished(record, 200, outcome.finished_s or 0.0):
                prompts.write(row_bytes(rows.row(due)))
            if outcome.finished_s is not None:
                _write(lines, record, outcome.finished_s)
    return ledger, capture


def _write(lines: BinaryIO, record: RequestRecord, now: float) -> None:
    with patch("time.time", lambda: STARTED_S + now):
        lines.write(usage_ledger._line(record, 200, now))


def _record(outcome: SimOutcome) -> RequestRecord:
    row = outcome.request
    record = RequestRecord(row.id, row.arrival_s, operation="chat", written=True)
    record.request = proxy_request(row)
    record.backend = outcome.backend or ""
    if outcome.sent_s is not None:
        record.sent_at, record.queued_s = outcome.sent_s, outcome.sent_s - row.arrival_s
    record.first_token_at = outcome.first_token_s
    record.used(row.input_tokens, outcome.cached_tokens, row.output_tokens)
    return record
