"""Read the requests of a real server with their times: replayed runs and results of other tools.

    run folder                     of `forebay replay`, with the trace that it replayed
    vllm bench serve and others    the file that `forebay report` takes, its last result
    CSV, JSON lines or JSON list   a row for each request, with the columns of `COLUMNS`

A result file knows lengths and not prompts. With the trace that it is of, prompts are the trace's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from forebay.replay.engine.calibration.points import parsed_rows
from forebay.traces.formats import TraceFormat, open_trace
from forebay.traces.formats.served import result_format, served_results
from forebay.traces.formats.totals import refuse_without_requests
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.rows import RowError, SourceRow

LEAST_DECODED = 8
"""Output tokens: fewer give no time per token."""
MOST_ADDED = 256
"""Tokens that a chat template may add to a prompt. With more, the run is of another trace."""
MOST_FAILED = 0.05
"""Largest share of failed requests, because their cost for the server is only estimated."""
_COLUMNS = ("id", "backend", "sent_s", "outcome", "reason", "status", "prompt_tokens",
            "cached_tokens", "output_tokens", "ttft_service_s", "e2e_service_s",
            "tpot_s")  # fmt: skip
_NOT_SERVED = ("connect", "tls", "never_sent")
COLUMNS = {
    "id": ("id", "request_id"),
    "sent": ("sent", "start", "start_time", "arrival", "arrival_time"),
    "input_tokens": ("input_tokens", "prompt_tokens", "input_len"),
    "output_tokens": ("output_tokens", "completion_tokens", "output_len"),
    "ttft": ("ttft", "ttft_service"),
    "e2e": ("e2e", "e2e_service", "latency"),
}
"""Columns of a per-request file and their names. Times end in _s, _ms or _ns, or are seconds.
A file may also have `cached_tokens` and `error`."""
_UNITS = {"": "s", "_s": "s", "_ms": "ms", "_ns": "ns"}


@dataclass(frozen=True, slots=True)
class Timed:
    """One request and its times in seconds. `tpot_s` is None below LEAST_DECODED tokens.

    A request that failed is not `finished`: it is played, because it took the server's time, and
    its own times are not compared. `cached_tokens` is None where the file does not say it.
    Requests of one `backend` were served by one engine. A `guessed` prompt was made up from what
    was cached.
    """

    row: TraceRequest
    sent_s: float
    ttft_s: float
    e2e_s: float
    tpot_s: float | None
    cached_tokens: int | None
    finished: bool = True
    backend: str = ""
    guessed: bool = False


def read_runs(folders: Sequence[Path], trace: Sequence[TraceRequest]) -> tuple[Timed, ...]:
    """Read the requests of replays of one trace. Each time is the median over the runs.

    A request has the prompt tokens that the server counted: a chat template adds tokens to a prompt
    of the trace. Requests after the end of a run that was shorter than its trace are left out,
    and so are requests that the server did not accept.

    Raises InputError for a run of another trace, of several servers, or with many failures.
    """
    tables = [_rows(folder) for folder in folders]
    for folder, table in zip(folders, tables, strict=True):
        _check_trace(folder, table, trace)
    timed = (_timed(row, [table[row.id] for table in tables if row.id in table]) for row in trace)
    return tuple(request for request in timed if request is not None)


def _timed(row: TraceRequest, records: Sequence[Mapping[str, Any]]) -> Timed | None:
    """Return a request with its median times, or None if no server worked on it."""
    done = [record for record in records if _answered(record)]
    if not done:
        return _failed(row, records)
    tpots = [record["tpot_s"] for record in done if record["tpot_s"]]
    output = done[0]["output_tokens"]
    return Timed(
        replace(row, input_tokens=done[0]["prompt_tokens"], output_tokens=output),
        done[0]["sent_s"],
        median(record["ttft_service_s"] for record in done),
        median(record["e2e_service_s"] for record in done),
        median(tpots) if tpots and output >= LEAST_DECODED else None,
        round(median(record["cached_tokens"] or 0 for record in done)),
    )


def _failed(row: TraceRequest, records: Sequence[Mapping[str, Any]]) -> Timed | None:
    """Return a request that failed with the tokens that it got, or None if no server served it."""
    for record in records:
        if _occupied(record):
            prompt, output = (
                record["prompt_tokens"] or row.input_tokens,
                record["output_tokens"] or 1,
            )
            played = replace(row, input_tokens=prompt, output_tokens=output)
            return Timed(played, record["sent_s"], 0.0, 0.0, None, 0, finished=False)
    return None


def _answered(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == "ok" and bool(row["ttft_service_s"])


def _occupied(row: Mapping[str, Any]) -> bool:
    """Return True if the server may have worked on this request, which failed."""
    return (
        row["outcome"] != "rejected"
        and row["sent_s"] is not None
        and row["reason"] not in _NOT_SERVED
        and row["status"] in (None, 200)
    )


def _rows(folder: Path) -> dict[str, dict[str, Any]]:
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(
            str(folder / "requests.parquet"), columns=list(_COLUMNS)
        ).to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: not a run folder: requests.parquet cannot be read") from error
    failed = [row["id"] for row in rows if row["outcome"] != "rejected" and not _answered(row)]
    if len(failed) > MOST_FAILED * len(rows):
        raise InputError(
            f"{folder}: {len(failed)} of {len(rows)} requests failed, {failed[0]} first; "
            "their effect on the others is not known"
        )
    answered = [row for row in rows if _answered(row)]
    if not answered:
        raise InputError(f"{folder}: no request was answered")
    if len({row["backend"] for row in answered}) > 1:
        raise InputError(f"{folder}: several servers; replay against one")
    return {row["id"]: row for row in rows}


def _check_trace(
    folder: Path, table: Mapping[str, Mapping[str, Any]], trace: Sequence[TraceRequest]
) -> None:
    ids = {row.id for row in trace}
    if not table.keys() <= ids:
        raise InputError(f"{folder}: has requests that are not in the trace")
    added: int | None = None  # tokens of a chat template: the same for every request
    end_s = max(row.arrival_s for row in trace if row.id in table)
    for row in trace:
        if row.id not in table:
            if row.arrival_s > end_s:  # the run was shorter than its trace
                continue
            raise InputError(
                f"{folder}: has no request {row.id}; --trace must be the replayed trace"
            )
        if not _answered(table[row.id]):
            continue
        counted = table[row.id]["prompt_tokens"] or 0
        more = counted - row.input_tokens
        added = more if added is None else added
        if more != added or not 0 <= more <= MOST_ADDED:
            raise InputError(
                f"{folder}: request {row.id} has {counted:,} prompt tokens, in the trace it has "
                f"{row.input_tokens:,}; --trace must be the replayed trace, and the server must "
                "count tokens as it does (a chat template may add the same number to each)"
            )


def read_measured(sources: Sequence[Path], trace: Path | None = None) -> tuple[Timed, ...]:
    """Read run folders of one trace, or one result file. Raises InputError.

    Args:
        trace: the replayed trace. None: for folders as run.json names it, for a file unknown.
    """
    if not is_results(sources[0]):
        return read_runs(sources, list(open_trace(trace or _trace_of(sources[0]))))
    if len(sources) > 1:
        raise InputError(f"{sources[1]}: a second source; give one result file, or run folders")
    return read_results(sources[0], None if trace is None else list(open_trace(trace)))


def is_results(path: Path) -> bool:
    """Return True for a file of requests, False for a folder and a file of points."""
    if not path.is_file():
        return False
    if result_format(path) is not None:
        return True
    with path.open("rb") as file:
        start = file.read(1 << 16)
    return b"ttft" in start and b"kind" not in start.split(b"\n", 1)[0]


def read_results(path: Path, trace: Sequence[TraceRequest] | None = None) -> tuple[Timed, ...]:
    """Read one file of per-request results, in the order of sending. Times start at 0.

    Args:
        trace: the requests in the order of the file, whose prompts they had. None: no two prompts
            are taken to share anything.

    Raises InputError that names the file, the request and the column.
    """
    tool = result_format(path)
    if tool is None:
        refuse_without_requests(path)
    requests = parsed_rows(path, _result) if tool is None else _of_tool(path, tool)
    if not requests:
        raise InputError(f"{path}: holds no requests")
    if trace is not None:
        requests = _with_prompts(path, requests, trace)
    if not any(request.finished for request in requests):
        raise InputError(f"{path}: no request was answered")
    first_s = min(request.sent_s for request in requests)
    moved = (replace(request, sent_s=request.sent_s - first_s) for request in requests)
    return tuple(sorted(moved, key=lambda request: request.sent_s))


def _with_prompts(
    path: Path, requests: Sequence[Timed], trace: Sequence[TraceRequest]
) -> list[Timed]:
    """Return the requests with the prompts of the trace (InputError: they are of another)."""
    if len(trace) != len(requests):
        raise InputError(
            f"{path}: has {len(requests):,} requests, --trace {len(trace):,}; give the trace it "
            "is of"
        )
    named = []
    for number, (request, traced) in enumerate(zip(requests, trace, strict=True), 1):
        prompt, output = request.row.input_tokens, request.row.output_tokens
        if not 0 <= prompt - traced.input_tokens <= MOST_ADDED:
            raise InputError(
                f"{path}: request {number} has {prompt:,} prompt tokens, in the trace it has "
                f"{traced.input_tokens:,}; give the trace it is of, in the same order"
            )
        row = replace(traced, input_tokens=prompt, output_tokens=output)
        named.append(replace(request, row=row))
    return named


def _of_tool(path: Path, tool: TraceFormat) -> list[Timed]:
    """Read the last result of another tool's file (InputError: bad values, no times of sending)."""
    results = list(served_results(path, tool).values())
    requests = []
    for number, served in enumerate(results[-1] if results else (), 1):
        prompt, output = max(1, served.input_tokens), max(1, served.output_tokens or 0)
        row = TraceRequest(f"r{number}", 0.0, prompt, output)
        sent_s = served.due_s + (served.wait_s or 0.0)
        times = sent_s, served.ttft_s or 0.0, served.e2e_s or 0.0
        try:
            requests.append(_request(row, times, None, failed=served.e2e_s is None))
        except RowError as error:
            raise InputError(f"{path}: request {number}: {error}") from error
    if len(requests) > 1 and len({request.sent_s for request in requests}) == 1:
        raise InputError(f"{path}: does not say when requests were sent; use a newer {tool.name}")
    return requests


def _result(row: SourceRow) -> Timed:
    """Read one row. A failed request may lack numbers (RowError: a bad or missing value)."""
    failed = bool(row.get("error"))
    prompt, output = (
        max(1, row.whole_or(0, *COLUMNS[name]) or 0 if failed else row.whole(*COLUMNS[name]))
        for name in ("input_tokens", "output_tokens")
    )
    sent_s, ttft_s, e2e_s = (_seconds(row, name, failed) for name in ("sent", "ttft", "e2e"))
    request = TraceRequest(row.text(*COLUMNS["id"]) or f"r{row.number}", 0.0, prompt, output)
    cached = row.whole_or(None, "cached_tokens")
    return _request(request, (sent_s, ttft_s, e2e_s), cached, failed=failed)


def _request(
    row: TraceRequest, times: tuple[float, float, float], cached: int | None, *, failed: bool
) -> Timed:
    """Make a request of its times: sent, first token, end (RowError: in no order)."""
    sent_s, ttft_s, e2e_s = times
    gap_s = gap_of(e2e_s - ttft_s, row.output_tokens)
    if not failed and (not 0 < ttft_s <= e2e_s or gap_s == 0.0):
        raise RowError(
            f"ttft {ttft_s:g} s, e2e {e2e_s:g} s; the first token comes after 0 and not after the "
            "last"
        )
    return Timed(row, sent_s, ttft_s, e2e_s, gap_s, cached, finished=not failed)


def gap_of(seconds: float, output: int) -> float | None:
    """Return the seconds per token after the first, None for a short answer."""
    return seconds / (output - 1) if output >= LEAST_DECODED else None


def _seconds(row: SourceRow, name: str, failed: bool) -> float:
    """Return a time under one of its names and units, or 0 if a failed request lacks it."""
    for column in COLUMNS[name]:
        for suffix, unit in _UNITS.items():
            if row.get(column + suffix) is not None:
                return row.seconds(column + suffix, unit=unit)
    if failed:
        return 0.0
    raise RowError(f"{name} is missing; give {' or '.join(COLUMNS[name])} with _s or _ms")


def model_of(path: Path) -> str | None:
    """Return the model that a run folder or a result file says it is of, or None."""
    folder = path.is_dir()
    named = _json_object(path / "run.json" if folder else path).get(
        "model" if folder else "model_id"
    )
    return named if isinstance(named, str) else None


def _json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} for any other file."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # a file of rows says nothing about its model
    return body if isinstance(body, dict) else {}


def _trace_of(run: Path) -> Path:
    """Return the trace that a run says it replayed (InputError: it names no trace)."""
    path = run / "run.json"
    try:
        trace = Path(_json_object(path)["trace"]["path"])
    except (KeyError, TypeError):
        raise InputError(f"{path}: names no trace; give it as --trace") from None
    if not trace.is_file():
        raise InputError(f"{path}: its trace {trace} is not there; give it as --trace")
    return trace
