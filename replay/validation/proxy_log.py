"""Read the proxy's usage ledger, or its request log in JSON, as requests of real servers.

A line has the times and lengths of one request and its backend, so each backend gets exactly its
requests again. Prompts come from the capture of the same time, if it is given. Otherwise a request
shares as many tokens as the server took from its cache, with the earlier prompt on its backend
whose length is nearest to them.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

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
SAME_S = 1.0
"""Difference of the clocks of log and capture within a run of the proxy."""
LEAST_MATCHED = 0.9


def is_log(path: Path) -> bool:
    """Return True for a usage ledger, and for a log in JSON with request lines near its start."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(1 << 20)
    return b'"duration_ms"' in start and b'"request_id"' in start


def read_log(path: Path, capture: Path | None = None) -> tuple[Timed, ...]:
    """Read the requests that reached a backend, in the order of sending. Times start at 0.

    Raises InputError that names the file, and the line or the missing part.
    """
    rows = parsed_rows(path, _request, skip_bad=True)
    requests = sorted((row for row in rows if row is not None), key=lambda row: row.sent_s)
    counted = sum(request.finished for request in requests)
    if counted < LEAST_REQUESTS:
        raise InputError(
            f"{path}: {counted:,} streamed answers with usage; give {LEAST_REQUESTS} or more, such "
            "as an hour of ordinary traffic"
        )
    if counted < (1 - MOST_UNCOUNTED) * len(requests):
        raise InputError(
            f"{path}: {len(requests) - counted:,} of {len(requests):,} requests have no streamed "
            "answer with usage; their effect on the others is not known"
        )
    first_s = requests[0].sent_s
    requests = [replace(request, sent_s=request.sent_s - first_s) for request in requests]
    if capture is not None:
        return tuple(_captured(path, requests, list(open_trace(capture))))
    return tuple(_shared(requests))


def _request(row: SourceRow) -> Timed | None:
    """Read a line. None: it is of no request, or no backend worked on it (RowError: bad value)."""
    status, backend = row.whole_or(None, "status"), row.text("backend")
    if row.get("duration_ms") is None or not backend or status not in (200, 499):
        return None
    # Times count from the arrival at the proxy, and the line is written at the end.
    took_s, queued_s, first_s = (_seconds(row, name) for name in ("duration", "queue", "ttft"))
    arrival_s = row.moment("time") - took_s
    prompt, output = (row.whole_or(0, f"{name}_tokens") or 0 for name in ("prompt", "output"))
    # An answer without usage or without a first token took the backend's time all the same.
    counted = min(prompt, output) > 0 and queued_s < first_s <= took_s
    whole = status == 200 and counted and not row.get("reason")
    request = TraceRequest(row.text("request_id") or "", arrival_s, max(1, prompt), max(1, output))
    return Timed(
        request,
        arrival_s + queued_s,
        first_s - queued_s if whole else 0.0,
        took_s - queued_s,
        gap_of(took_s - first_s, output) if whole else None,
        row.whole_or(0, "cached_tokens"),
        finished=whole,
        backend=backend,
    )


def _seconds(row: SourceRow, name: str) -> float:
    """Return a time in seconds, 0 where the request did not get as far."""
    column = f"{name}_ms"
    return 0.0 if row.get(column) is None else row.seconds(column, unit="ms")


def _captured(
    path: Path, requests: Sequence[Timed], capture: Sequence[TraceRequest]
) -> list[Timed]:
    """Find each request in the capture, by its lengths and its arrival."""
    places = defaultdict[tuple[int, int], list[TraceRequest]](list)
    for row in capture:
        places[row.input_tokens, row.output_tokens].append(row)
    # Lengths that occur once say how far the clocks are apart.
    once = Counter(_lengths(request) for request in requests)
    apart = [
        request.row.arrival_s - places[_lengths(request)][0].arrival_s
        for request in requests
        if once[_lengths(request)] == len(places.get(_lengths(request), ())) == 1
    ]
    zero_s, count = median(apart) if apart else 0.0, 0
    # The nearest arrival of the same lengths is the request itself.
    matched = []
    for request in requests:
        at_s = request.row.arrival_s - zero_s
        alike = places.get(_lengths(request), [])
        near = min(alike, key=lambda row: abs(row.arrival_s - at_s), default=None)
        if near is not None and abs(near.arrival_s - at_s) <= SAME_S:
            count += 1
            blocks, size = near.blocks, near.block_tokens
            request = replace(request, row=replace(request.row, blocks=blocks, block_tokens=size))
        matched.append(request)
    counted = sum(request.finished for request in requests)
    if count < LEAST_MATCHED * counted:
        raise InputError(
            f"{path}: --trace has {count:,} of its {counted:,} requests; give the capture of the "
            "same hour"
        )
    return matched


def _lengths(request: Timed) -> tuple[int, int]:
    return request.row.input_tokens, request.row.output_tokens


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
