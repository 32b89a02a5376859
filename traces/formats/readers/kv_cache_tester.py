"""Read kv-cache-tester sessions: real coding-agent conversations as hashed 64-token blocks.

They are in files, or in a folder of files. One JSON file is one session: `requests[]` with `t`
(seconds from the session's start), `in`, `out` and `hash_ids`, one id for each *full* block (unlike
Mooncake, whose last block is partial). Entries of `type: subagent` contain more requests, whose `t`
counts from the entry's `t`. Ids are valid only within a session, so each session gets a range of
its own. So the text that sessions share (tools and system prompt, about 13k tokens) is lost. Weka's
traces (AgentX) have the same form, one session a line, but all their times count from the session's
start. Source: callanjfox/kv-cache-tester (Apache-2.0).

A turn waits for the turn before it, and for the last answers of the sub-agents started since then.
The first request of a sub-agent waits for the turn that started it. `think_s` is the time from the
end of the last of these answers (`t` + `api_time`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from forebay.traces.formats.table import ReadOptions, TraceFormat
from forebay.traces.ground.errors import InputError, reading
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.containers import table_rows
from forebay.traces.reading.jsonl import seconds, whole_number
from forebay.traces.reading.unpack import open_input
from forebay.traces.rows import SHAPE_ERRORS, FileFacts, RowError, shape_error

_SUFFIXES = (".json", ".jsonl", ".parquet", ".gz", ".bz2", ".xz", ".zst")
_IDS_PER_SESSION = 1 << 32  # the lower half is for full blocks, the upper for partial last ones


def read_sessions(path: str | Path) -> list[list[TraceRequest]]:
    """Read the sessions of a file or folder. Times count from the start of each session.

    Raises:
        InputError: no such file, no session in the folder, or not sessions as described above.
    """
    path = Path(path)
    files = sorted(file for file in path.glob("*") if file.suffix in _SUFFIXES)
    if path.is_dir() and not files:
        raise InputError(f"{path}: holds no session ({', '.join(_SUFFIXES)}); give their folder")
    sessions: list[list[TraceRequest]] = []
    for file in files or [path]:
        where = str(file)
        try:
            with reading(file), open_input(where) as opened:
                for line, row in table_rows(opened, FileFacts(path=str(file))):
                    where = f"{file}:{line}"
                    if isinstance(row, RowError):
                        raise row
                    name = f"{file.stem}-{line}"
                    sessions.append(session_requests(row.values, name, len(sessions)))
                    where = str(file)
        except RowError as error:
            raise InputError(f"{where}: {error}") from error
        except SHAPE_ERRORS as error:
            raise InputError(f"{where}: {shape_error(error)}") from error
    return sessions


def _read(path: Path, options: ReadOptions) -> Iterator[TraceRequest]:
    sessions = read_sessions(path)
    if len(sessions) == 1:
        yield from sessions[0]
        return
    yield from interleaved(
        sessions,
        start_gap_s=options.session_gap_s,
        longest_gap_s=options.longest_pause_s,
        seed=options.seed,
    )


kv_cache_tester = TraceFormat(
    name="kv-cache-tester",
    what="coding-agent sessions of kv-cache-tester and Weka: files, or a folder of them",
    keeps="blocks, sessions, parents, sub-agents, think times, models",
    recognise=lambda head: head.has("block_size", "hash_id_scope"),
    folder=_read,
)


def session_requests(session: dict[str, Any], name: str, number: int) -> list[TraceRequest]:
    """Make the requests of one session in order of time. `arrival_s` counts from its start.

    Sessions with different numbers share no block id. Raises RowError for another object.
    """
    name = str(session.get("id") or name)
    block_tokens = whole_number(session, "block_size", least=1)
    nested = not _counts_from_start(session)
    calls = sorted(_calls(session, 0.0, None, nested), key=lambda call: call.at_s)
    if not calls:
        raise RowError("a session without requests; leave it out")
    names = {id(call): f"{name}-{index}" for index, call in enumerate(calls)}
    requests = []
    # A prompt shares most ids with the prompt before, so each id is one object.
    ids: dict[int, int] = {}
    for index, call in enumerate(calls):
        ends_s = [earlier.end_s for earlier in (call.before, *call.waits_for) if earlier]
        request = _request(call, names[id(call)], name, block_tokens, (number, index), ids)
        requests.append(
            replace(
                request,
                parent=None if call.before is None else names[id(call.before)],
                waits_for=tuple(names[id(earlier)] for earlier in call.waits_for),
                think_s=round(max(0.0, call.at_s - max(ends_s)), 6) if ends_s else None,
            )
        )
    return requests


def interleaved(
    sessions: Sequence[Sequence[TraceRequest]],
    *,
    start_gap_s: float,
    longest_gap_s: float,
    seed: int,
) -> list[TraceRequest]:
    """Make one trace of all `sessions` in random order.

    The files do not say when sessions began. Here they start as a Poisson process, on average
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
            think_s = None if request.think_s is None else min(request.think_s, longest_gap_s)
            rows.append(replace(request, arrival_s=round(at_s, 6), think_s=think_s))
        start_s += dice.expovariate(1 / start_gap_s)
    return sorted(rows, key=lambda request: request.arrival_s)


@dataclass(slots=True)
class _Call:
    """One request of a session, with the calls whose answers it waits for."""

    at_s: float
    row: dict[str, Any]
    before: "_Call | None"
    waits_for: "tuple[_Call, ...]" = ()

    @property
    def end_s(self) -> float:
        return self.at_s + float(self.row.get("api_time") or 0.0)


def _counts_from_start(session: dict[str, Any]) -> bool:
    """True if times inside sub-agents count from the session's start, as in Weka's traces.

    If they count from the sub-agent's entry, its first request is at about 0. If the entry itself
    is at 0, both readings agree.
    """
    entries = [row for row in _listed(session) if row.get("type") == "subagent"]
    return bool(entries) and all(
        seconds(inner, "t") >= seconds(entry, "t") for entry in entries for inner in _listed(entry)
    )


def _listed(holder: dict[str, Any]) -> list[dict[str, Any]]:
    rows = holder.get("requests")
    if not isinstance(rows, list) or any(not isinstance(row, dict) for row in rows):
        raise RowError("requests: not a list of objects; is this a kv-cache-tester session?")
    return rows


def _calls(
    holder: dict[str, Any], start_s: float, starter: _Call | None, nested: bool
) -> list[_Call]:
    """List the calls of a session or sub-agent. With `nested`, times count from its entry."""
    rows = _listed(holder)
    # `ended` has the last calls of the sub-agents that the next turn waits for.
    calls: list[_Call] = []
    last: _Call | None = None
    ended: list[_Call] = []
    for row in rows:
        at_s = start_s + seconds(row, "t")
        if row.get("api_time") is not None:
            seconds(row, "api_time")
        if row.get("type") == "subagent":
            inner = _calls(row, at_s if nested else 0.0, last or starter, nested)
            calls += inner
            if inner and row.get("status") != "async_launched":
                ended.append(max(inner, key=lambda call: call.at_s))
            continue
        waits_for = tuple(call for call in ended if call.at_s <= at_s)
        if last is None and starter is not None and starter.at_s <= at_s:
            waits_for = (starter, *waits_for)
        last = _Call(at_s, row, last, waits_for)
        ended.clear()
        calls.append(last)
    return calls


def _request(
    call: _Call, name: str, session: str, block_tokens: int, place: tuple[int, int],
    interned: dict[int, int],
) -> TraceRequest:  # fmt: skip
    """Make a request. `place` is the number of the session, and the request's number in it."""
    row, (number, index) = call.row, place
    input_tokens = whole_number(row, "in", least=1)
    # The ids are of full blocks only.
    ids = row.get("hash_ids")
    full = input_tokens // block_tokens
    if not isinstance(ids, list) or len(ids) != full:
        count = len(ids) if isinstance(ids, list) else "no list of"
        raise RowError(
            f"request {name}: {count} hash_ids for {input_tokens} tokens; full blocks of "
            f"{block_tokens} tokens make {full}"
        )
    if any(type(block) is not int or not 0 <= block < _IDS_PER_SESSION // 2 for block in ids):
        raise RowError(f"request {name}: hash_ids must be whole numbers from 0 to 2^31")
    # Shift the ids into the range of this session.
    base = number * _IDS_PER_SESSION
    blocks = [interned.setdefault(block, base + block) for block in ids]
    if input_tokens % block_tokens:
        blocks.append(base + _IDS_PER_SESSION // 2 + index)  # a partial block, never shared
    return TraceRequest(
        id=name,
        arrival_s=call.at_s,
        input_tokens=input_tokens,
        output_tokens=whole_number(row, "out", least=0),
        blocks=tuple(blocks),
        block_tokens=block_tokens,
        session=session,
        model=row.get("model") if isinstance(row.get("model"), str) else None,
    )
