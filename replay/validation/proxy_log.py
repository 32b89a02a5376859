"""Read the proxy's capture, its usage ledger or its log in JSON, as requests of real servers.

Each has the times and lengths of a request and its backend, so each backend gets exactly its
requests again. A capture has the prompts, too. Without it a request shares as many tokens as the
server took from its cache, with the earlier prompt on its backend whose length is nearest to them.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from forebay.replay.engine.calibration.points import parsed_rows
from forebay.replay.validation.measured import Timed, gap_of
from forebay.traces.formats import open_trace
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.rows import SourceRow

LEAST_REQUESTS = 200
"""Fewest whole answers of ordinary traffic that a fit needs."""
MOST_UNCOUNTED = 0.2
"""Largest share of requests without a whole answer, whose cost for the server is estimated."""
SHARED_TOKENS = 16
"""Tokens of a block of the prompts that are made up here."""
SERVED = (200, 499)
"""Statuses of requests that a backend worked on: answered, or left by the client."""


def is_log(path: Path) -> bool:
    """Return True for a usage ledger, and for a log in JSON with request lines near its start."""
    start = _start(path)
    return b'"duration_ms"' in start and b'"request_id"' in start


def is_trace(path: Path) -> bool:
    """Return True for a file of Forebay's trace format, which may be a capture."""
    start = _start(path).partition(b"\n")[0]
    is_row = b'"arrival_s"' in start and b'"input_tokens"' in start
    return is_row and (b"ttft" not in start or b'"observed"' in start)


def _start(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(1 << 20)


def read_log(path: Path, capture: Path | None = None) -> tuple[Timed, ...]:
    """Read the requests that reached a backend, in the order of sending. Times start at 0.

    Args:
        path: a ledger, a log or a capture.
        capture: the capture of the same time. It has the same requests, and their prompts.

    Raises InputError that names the file, and the line or the missing part.
    """
    if capture is not None or is_trace(path):
        path = capture or path
        return tuple(_checked(path, timed_rows(open_trace(path))))
    rows = parsed_rows(path, _request, skip_bad=True)
    requests = sorted((row for row in rows if row is not None), key=_sent_s)
    return tuple(_shared(_checked(path, requests)))


def timed_rows(rows: Iterable[TraceRequest]) -> list[Timed]:
    """Return the captured requests that reached a backend, in the order of sending."""
    return sorted((timed for row in rows if (timed := _captured(row)) is not None), key=_sent_s)


def _sent_s(request: Timed) -> float:
    return request.sent_s


def _checked(path: Path, requests: list[Timed]) -> list[Timed]:
    """Let the times start at 0 (InputError: too few requests have all their times)."""
    counted = sum(request.finished for request in requests)
    if counted < LEAST_REQUESTS:
        raise InputError(
            f"{path}: {counted:,} streamed answers with usage; give {LEAST_REQUESTS} or more, as "
            "the capture or the ledger of an hour of ordinary traffic has"
        )
    if counted < (1 - MOST_UNCOUNTED) * len(requests):
        raise InputError(
            f"{path}: {len(requests) - counted:,} of {len(requests):,} requests have no streamed "
            "answer with usage; their effect on the others is not known"
        )
    first_s = requests[0].sent_s
    return [replace(request, sent_s=request.sent_s - first_s) for request in requests]


def _captured(row: TraceRequest) -> Timed | None:
    """Read the times of a captured row. None: no backend worked on it, or it still runs."""
    times = row.observed or {}
    if row.status not in SERVED or not {"sent_s", "e2e_s", "backend"} <= times.keys():
        return None
    took = times["sent_s"], times.get("ttft_s", 0.0), times["e2e_s"]
    whole = row.status == 200 and "cached_tokens" in times
    return _timed(row, times["backend"], took, times.get("cached_tokens"), whole)


def _request(row: SourceRow) -> Timed | None:
    """Read a line. None: it is of no request, or no backend worked on it (RowError: bad value)."""
    status, backend = row.whole_or(None, "status"), row.text("backend")
    if row.get("duration_ms") is None or not backend or status not in SERVED:
        return None
    # Times count from the arrival at the proxy, and the line is written at the end.
    took_s, queued_s, first_s = (_seconds(row, name) for name in ("duration", "queue", "ttft"))
    prompt, output = (row.whole_or(0, f"{name}_tokens") or 0 for name in ("prompt", "output"))
    request = TraceRequest(
        row.text("request_id") or "", row.moment("time") - took_s, max(1, prompt), max(1, output)
    )
    whole = status == 200 and min(prompt, output) > 0 and not row.get("reason")
    cached = row.whole_or(0, "cached_tokens")
    return _timed(request, backend, (queued_s, first_s, took_s), cached, whole)


def _timed(
    row: TraceRequest, backend: str, times: tuple[float, float, float], cached: int | None,
    whole: bool,
) -> Timed:  # fmt: skip
    """Make a request of its times, in seconds after its arrival: sent, first token, end.

    An answer without usage or without a first token took the backend's time all the same. Its
    own times are not compared.
    """
    sent_s, first_s, took_s = times
    whole = whole and sent_s < first_s <= took_s
    return Timed(
        row,
        row.arrival_s + sent_s,
        first_s - sent_s if whole else 0.0,
        took_s - sent_s,
        gap_of(took_s - first_s, row.output_tokens) if whole else None,
        cached,
        finished=whole,
        backend=backend,
    )


def _seconds(row: SourceRow, name: str) -> float:
    """Return a time in seconds, 0 where the request did not get as far."""
    column = f"{name}_ms"
    return 0.0 if row.get(column) is None else row.seconds(column, unit="ms")


def _shared(requests: Sequence[Timed]) -> list[Timed]:
    """Make up prompts that share the cached tokens. They are in the order of sending."""
    earlier = defaultdict[str, list[tuple[int, int]]](list)  # length and place, by backend
    done: list[Timed] = []
    for place, request in enumerate(requests):
        row, cached = request.row, request.cached_tokens or 0
        prompts, shared = earlier[request.backend], tuple[int, ...]()
        if cached and prompts:
            at = bisect_left(prompts, (cached, 0))
            near = prompts[max(0, at - 1) : at + 1]
            _, other = min(near, key=lambda prompt: abs(prompt[0] - cached))
            shared = (done[other].row.blocks or ())[: cached // SHARED_TOKENS]
        own = range(len(shared), -(-row.input_tokens // SHARED_TOKENS))
        blocks = *shared, *((place << 24) + index for index in own)
        row = replace(row, blocks=blocks, block_tokens=SHARED_TOKENS)
        done.append(replace(request, row=row, guessed=True))
        insort(prompts, (row.input_tokens, place))
    return done
