"""Read kv-cache-tester sessions: real coding-agent conversations as hashed 64-token blocks.

One JSON file is one session: `requests[]` with `t` (seconds from the session's start), `in`, `out`
and `hash_ids`, one id for each *full* block (unlike Mooncake, whose last block is partial). Entries
of `type: subagent` contain more requests, whose `t` counts from the entry's. Ids are valid within a
session only, so each session gets a range of its own. The text that sessions really share (tools
and system prompt, about 13k tokens) is therefore lost. Source: callanjfox/kv-cache-tester
(Apache-2.0).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from forebay.traces.errors import InputError
from forebay.traces.jsonl import parse_object, seconds, whole_number
from forebay.traces.reader import RowError
from forebay.traces.schema import TraceRequest

_IDS_PER_SESSION = 1 << 32  # the lower half is for full blocks, the upper for partial last ones


def read_session(path: str | Path, number: int = 0) -> list[TraceRequest]:
    """Read the requests of one session in order of time; `arrival_s` counts from its start.

    Args:
        number: number of the session; sessions with different numbers share no block id.

    Raises:
        InputError: no such file, or not a session as described above.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        session = parse_object(content)
        name = str(session.get("id") or Path(path).stem)
        block_tokens = whole_number(session, "block_size", least=1)
        rows = sorted(_requests(session, 0.0), key=lambda row: row[0])
        found = [
            _request(row, at_s, f"{name}-{index}", name, block_tokens, number, index)
            for index, (at_s, row) in enumerate(rows)
        ]
    except RowError as error:
        raise InputError(f"{path}: {error}") from error
    if not found:
        raise InputError(f"{path}: a session without requests; leave the file out")
    return found


def read_sessions(folder: str | Path) -> list[list[TraceRequest]]:
    """Read all sessions in `folder` (*.json), by name; raises InputError if there is none."""
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        raise InputError(f"{folder}: holds no session (*.json); give the kv_cache_tester folder")
    return [read_session(file, number) for number, file in enumerate(files)]


def interleaved(
    sessions: Sequence[Sequence[TraceRequest]],
    *,
    start_gap_s: float,
    longest_gap_s: float,
    seed: int,
) -> list[TraceRequest]:
    """Make one trace of all `sessions` in random order.

    The files do not tell when sessions began. Here they start as a Poisson process, on average
    `start_gap_s` seconds apart. Longer pauses of a user are cut to `longest_gap_s`.
    """
    if not (start_gap_s > 0 and longest_gap_s > 0):
        raise InputError("start_gap_s and longest_gap_s: give more than 0 seconds")
    dice = Random(f"{seed}:sessions")
    rows: list[TraceRequest] = []
    start_s = 0.0
    for session in dice.sample(sessions, len(sessions)):
        at_s, last_s = start_s, session[0].arrival_s
        for request in session:
            at_s += min(request.arrival_s - last_s, longest_gap_s)
            last_s = request.arrival_s
            rows.append(replace(request, arrival_s=round(at_s, 6)))
        start_s += dice.expovariate(1 / start_gap_s)
    return sorted(rows, key=lambda request: request.arrival_s)


def _requests(holder: dict[str, Any], start_s: float) -> list[tuple[float, dict[str, Any]]]:
    listed = holder.get("requests")
    if not isinstance(listed, list) or any(not isinstance(row, dict) for row in listed):
        raise RowError("requests: not a list of objects; is this a kv-cache-tester session?")
    found: list[tuple[float, dict[str, Any]]] = []
    for row in listed:
        at_s = start_s + seconds(row, "t")
        if row.get("type") == "subagent":
            found += _requests(row, at_s)
        else:
            found.append((at_s, row))
    return found


def _request(
    row: dict[str, Any], at_s: float, name: str, session: str, block_tokens: int, number: int,
    index: int,
) -> TraceRequest:  # fmt: skip
    input_tokens = whole_number(row, "in", least=1)
    ids = row.get("hash_ids")
    full = input_tokens // block_tokens
    if not isinstance(ids, list) or len(ids) != full:
        found = len(ids) if isinstance(ids, list) else "no list of"
        raise RowError(
            f"request {name}: {found} hash_ids for {input_tokens} tokens; full blocks of "
            f"{block_tokens} tokens make {full}"
        )
    if any(type(one) is not int or not 0 <= one < _IDS_PER_SESSION // 2 for one in ids):
        raise RowError(f"request {name}: hash_ids must be whole numbers from 0 to 2^31")
    base = number * _IDS_PER_SESSION
    blocks = [base + one for one in ids]
    if input_tokens % block_tokens:
        blocks.append(base + _IDS_PER_SESSION // 2 + index)  # a partial block, never shared
    return TraceRequest(
        id=name,
        arrival_s=at_s,
        input_tokens=input_tokens,
        output_tokens=whole_number(row, "out", least=0),
        blocks=tuple(blocks),
        block_tokens=block_tokens,
        session=session,
    )
