"""Read the requests and their outcomes: a trace, a capture, or the admin URL of a running proxy.

Only a capture has the times of the original answers. Its rows are numbered, so lost rows are
counted. Joined captures, one for each start of a proxy, are played one after the other. Rows that
are no requests are left out and counted, up to a limit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from forebay.analysis.tune.figures import OBSERVABLE, Observed
from forebay.proxy.diagnose.admin_client import Unreachable, ask, ask_json
from forebay.replay.sim.workload import SimWorkload
from forebay.traces.formats import open_trace
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import parse_row
from forebay.traces.rows import RowError

FEWEST_ROWS = 100
MOST_BAD = 0.05
"""Largest share of rows that may be left out: beyond it the file is another than meant."""
RESTART_S = 60.0
"""Time between joined captures: the true one is not recorded."""
LONG_GAP = 0.2
"""A time without requests that is this share of the whole is reported."""
CAPTURED = b'{"id":"captured-'
HEAD_BYTES = 1 << 16
ANSWERED = 200


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """The set-up of a running proxy, as its admin port tells it."""

    mode: str
    routing: str
    servers: int
    scheduler: str
    threshold: int
    model: str
    captured_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival, the first at 0.

    Attributes:
        remarks: sentences about gaps and losses.
        proxy: the proxy that recorded them, if it was asked.
    """

    name: str
    rows: list[TraceRequest]
    remarks: tuple[str, ...] = ()
    proxy: RunningProxy | None = None

    def servers(self) -> int:
        """Return the number of servers that answered, 0 if it is not known."""
        return len({row.observed.get("backend") for row in self.rows if row.observed} - {None})


@dataclass(slots=True)
class FileRows:
    """The rows of a file, with the numbers of bad and lost rows."""

    rows: list[TraceRequest] = field(default_factory=list)
    bad: int = 0
    first_bad: str = ""
    lost: int = 0
    starts: int = 1


def read_traffic(
    source: str, since_s: float, format_name: str | None, most: int, *, last_bytes: float = inf
) -> Traffic:
    """Read a file, or the capture of a running proxy. Raises InputError.

    Args:
        since_s: only the last seconds count.
        most: most requests, from the first of these.
        last_bytes: read no more of a proxy's capture than its end.
    """
    proxy = None
    if source.startswith(("http://", "https://")):
        proxy = running_proxy(source)
        offset = int(max(0, proxy.captured_bytes - last_bytes))
        taken = _captured(source, _fetched(source, offset), tail=offset > 0)
    elif _is_capture(source) and format_name is None:
        with Path(source).open("rb") as file:
            taken = _captured(source, file)
    else:
        taken = _opened(source, format_name)
    return _checked(source, taken, since_s, most, proxy)


def _is_capture(path: str) -> bool:
    """True for a file that a proxy has captured."""
    if not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return CAPTURED in file.read(HEAD_BYTES)


def _opened(path: str, format_name: str | None) -> FileRows:
    taken = FileRows()
    with open_trace(Path(path), format_name=format_name, skip_bad=True) as reader:
        taken.rows = list(reader)
        taken.bad, taken.first_bad = reader.skipped, reader.first_skipped
    return taken


def _captured(name: str, lines: Iterator[bytes], *, tail: bool = False) -> FileRows:
    """Read the lines of captures, which may have been joined, or of the `tail` of one."""
    taken, number, offset_s, last_s = FileRows(), 0, 0.0, 0.0
    for at, line in enumerate(lines, 1):
        try:
            row = parse_row(line)
            this = int(row.id.removeprefix("captured-"))
        except (RowError, ValueError) as error:
            taken.bad += 1
            taken.first_bad = taken.first_bad or f"{name}:{at}: {error}"
            continue
        if tail and not taken.rows:
            number = this - 1
        if this <= number or row.arrival_s + offset_s < last_s:
            taken.starts += 1
            offset_s, number = last_s + RESTART_S, 0
        taken.lost += this - number - 1
        number, last_s = this, row.arrival_s + offset_s
        # Ids of several files are equal.
        taken.rows.append(replace(row, id=f"{taken.starts}-{this}", arrival_s=last_s))
    return taken


def _fetched(admin: str, offset: int) -> Iterator[bytes]:
    """Yield the lines of a proxy's capture. It grows meanwhile: the last line may be a part."""
    cut, rest = offset > 0, b""
    while part := ask(admin, f"/capture?offset={offset}"):
        offset += len(part)
        *lines, rest = (rest + part).split(b"\n")
        yield from lines[cut:]
        cut = cut and not lines


def running_proxy(admin: str) -> RunningProxy:
    """Ask a proxy for its set-up (InputError: another server, or nothing is captured)."""
    try:
        status = ask_json(admin, "/status", "uptime_s")
    except Unreachable as error:
        raise _not_a_proxy(admin, error) from None
    # Only one process that captures has all of the traffic.
    if "workers" in status:
        raise InputError(
            f"{admin}: a proxy with --workers captures in a file for each worker; "
            "give one of these files, and a fleet as large as its share"
        )
    if status["capture"] is None:
        raise InputError(
            f"{admin}: this proxy keeps no traffic; set capture.path in its file "
            "(docs/how-to/record-traffic.md), restart it, and come back after some traffic"
        )
    # The first backend stands for all.
    backends = status["backends"]
    models = {name for backend in backends for name in backend["models"] or ()}
    first: Mapping[str, Any] = backends[0] if backends else {}
    return RunningProxy(
        status["mode"],
        status["routing"],
        len(backends),
        first.get("scheduler", "vllm"),
        first.get("long_prefill_token_threshold") or 0,
        next(iter(models)) if len(models) == 1 else "",
        status["capture"].get("bytes", 0),
    )


def _not_a_proxy(admin: str, error: InputError) -> InputError:
    """Return the error of a URL that is no admin port. For a vLLM it says where to put a proxy."""
    try:
        version = ask_json(admin, "/version", "version")["version"]
    except InputError:
        return error
    return InputError(
        f"{admin}: is a vLLM server ({version}) or the public port of a proxy; give the admin port "
        "of a proxy that captures (listen.admin_port). Without a proxy nothing is recorded: put "
        "one in front, with mode: observe and capture.path"
    )


def _checked(
    name: str, taken: FileRows, since_s: float, most: int, proxy: RunningProxy | None
) -> Traffic:
    """Cut the rows to the asked time, and check that there are enough of them."""
    rows, remarks = taken.rows, list(_remarks(taken))
    if taken.bad > MOST_BAD * (taken.bad + len(rows)):
        raise InputError(
            f"{name}: {taken.bad:,} of {taken.bad + len(rows):,} rows are no requests; the first: "
            f"{taken.first_bad}"
        )
    if rows:
        first_s = max(rows[0].arrival_s, rows[-1].arrival_s - since_s)
        late = [row for row in rows if row.arrival_s >= first_s]
        rows = [replace(row, arrival_s=row.arrival_s - late[0].arrival_s) for row in late[:most]]
        if len(late) > most:
            remarks.append(f"The first {most:,} of {len(late):,} requests count (--requests).")
    if len(rows) < FEWEST_ROWS:
        span_s = rows[-1].arrival_s if rows else 0.0
        later = "; come back when it has more" if proxy is not None else ""
        raise InputError(
            f"{name}: has only {len(rows)} requests in {span_s:.0f} s, {FEWEST_ROWS} are needed"
            f"{later}"
        )
    return Traffic(name, rows, (*remarks, *_about(rows)), proxy)


def _remarks(taken: FileRows) -> Iterator[str]:
    total = len(taken.rows)
    if taken.bad:
        yield (
            f"{taken.bad:,} of {taken.bad + total:,} rows are no requests and are left out; the "
            f"first: {taken.first_bad}."
        )
    if taken.lost:
        yield (
            f"{taken.lost:,} of {taken.lost + total:,} captured rows are missing: the load was "
            "higher than what is played."
        )
    if taken.starts > 1:
        yield (
            f"The proxy was started {taken.starts} times: the captures are played one after the "
            f"other, {RESTART_S:g} s apart."
        )


def _about(rows: Sequence[TraceRequest]) -> Iterator[str]:
    """Yield sentences about a long gap and about a single tenant."""
    arrivals_s = np.array([row.arrival_s for row in rows])
    gaps_s = np.diff(arrivals_s)
    longest = int(gaps_s.argmax())
    if gaps_s[longest] > max(RESTART_S, LONG_GAP * arrivals_s[-1]):
        lasted_min, after_min = gaps_s[longest] / 60, arrivals_s[longest] / 60
        yield (
            f"No request came for {lasted_min:.0f} min after {after_min:.0f} min: if that is a gap "
            "of the capture, use the part before or after it."
        )
    tenants = {row.tenant for row in rows}
    if len(tenants) == 1 and None not in tenants:
        yield "All requests are of one tenant: what others sent to these servers is not played."


def fitted(rows: Sequence[TraceRequest], context: int, too_long: str) -> list[TraceRequest]:
    """Return the rows as a simulation plays them (InputError: one exceeds the model's context).

    A request without an answer has the length of the median answer: the captured limit is rarely
    reached.
    """
    lengths = [row.output_tokens for row in rows if _answered(row)]
    usual = round(median(lengths)) if lengths else None
    played = [
        replace(row, output_tokens=max(1, min(usual, row.output_tokens)))
        if usual is not None and not _answered(row)
        else row
        for row in rows
    ]
    return SimWorkload(played, too_long=too_long).source(context)


def _answered(row: TraceRequest) -> bool:
    return row.status == ANSWERED and "e2e_s" in (row.observed or {})


def observed_of(rows: Sequence[TraceRequest]) -> Observed | None:
    """Return the outcomes of the rows, None if no row has its own."""
    if not any(row.observed for row in rows):
        return None
    done = np.array([_answered(row) for row in rows])
    refused = np.array([(row.status or 0) >= 400 and row.status != 499 for row in rows])
    times = {
        name: np.array([(row.observed or {}).get(f"{name}_s", np.nan) for row in rows], dtype=float)
        for name in ("ttft", "e2e")
    }
    tokens = np.array([row.output_tokens for row in rows], dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, (times["e2e"] - times["ttft"]) / (tokens - 1), np.nan)
    metrics = dict(zip(OBSERVABLE, (times["ttft"], times["e2e"], tpot), strict=True))
    # A whole answer without a stream shows no first token, so nothing of it is compared.
    done &= ~np.isnan(metrics["ttft"])
    return Observed(metrics, done | refused, done)
