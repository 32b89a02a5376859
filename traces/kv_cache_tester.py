"""Read kv-cache-tester sessions: coding agents whose prompts grow from turn to turn.

One JSON file a session: `{"id", "block_size": 64, "requests": [{"t", "in", "out", "hash_ids"}]}`,
`t` in seconds from the session's start, one hash id for each full block of `in` tokens. Ids are of
the session alone, so each session gets a range of its own. Sub-agents (`type: subagent`) are left
out: they hold requests of their own and no prompt. Source: callanjfox/kv-cache-tester.

Sessions have no absolute start, so where they begin is up to `traffic`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import pairwise
from pathlib import Path
from random import Random

import orjson

from forebay.traces.errors import InputError
from forebay.traces.jsonl import block_ids, seconds, whole_number
from forebay.traces.reader import RowError
from forebay.traces.schema import TraceRequest

SPAN = 1 << 32
"""Block ids of one session; those of the next begin there."""


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of one session, the first at 0 seconds."""

    name: str
    turns: tuple[TraceRequest, ...]


def read_sessions(folder: str | Path) -> list[Session]:
    """Every `*.json` of `folder` by name; InputError names the file and what is wrong with it."""
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise InputError(f"{folder}: no *.json in it; name the folder of the sessions")
    return [_read(path, number) for number, path in enumerate(paths)]


def traffic(
    sessions: Sequence[Session], *, every_s: float, longest_gap_s: float = 120.0, seed: int = 0
) -> Iterator[TraceRequest]:
    """Sessions in random order, one begun every `every_s` on average (Poisson), in order of time.

    Args:
        longest_gap_s: a user who was away for longer is back after that.
    """
    if not every_s > 0:
        raise InputError(f"every_s {every_s:g}: give more than 0 seconds between sessions")
    dice = Random(f"{seed}:sessions")
    order = dice.sample(sessions, len(sessions))
    start_s, streams = 0.0, []
    for session in order:
        streams.append(_placed(session, start_s, longest_gap_s))
        start_s += dice.expovariate(1 / every_s)
    yield from merge(*streams, key=lambda row: row.arrival_s)


def _placed(session: Session, start_s: float, longest_gap_s: float) -> Iterator[TraceRequest]:
    before_s, now_s = 0.0, start_s
    for turn in session.turns:
        now_s += min(longest_gap_s, turn.arrival_s - before_s)
        before_s = turn.arrival_s
        yield replace(turn, arrival_s=round(now_s, 6))


def _read(path: Path, number: int) -> Session:
    try:
        whole = orjson.loads(path.read_bytes())
        name, size = str(whole["id"]), whole_number(whole, "block_size", least=1)
        rows = [row for row in whole["requests"] if row.get("type") != "subagent"]
        turns = [_turn(row, f"{name}-{turn}", name, size, number) for turn, row in enumerate(rows)]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, RowError) as error:
        raise InputError(f"{path}: not a session of kv-cache-tester ({error!r})") from error
    if not turns:
        raise InputError(f"{path}: no request in it; leave the file out")
    start_s = turns[0].arrival_s
    moved = [replace(turn, arrival_s=turn.arrival_s - start_s) for turn in turns]
    if any(a.arrival_s > b.arrival_s for a, b in pairwise(moved)):
        raise InputError(f"{path}: times go back; sort its requests by t")
    return Session(name, tuple(moved))


def _turn(row: dict[str, object], name: str, session: str, size: int, number: int) -> TraceRequest:
    tokens = whole_number(row, "in", least=1)
    full = tokens // size
    blocks = block_ids(row, "hash_ids", full * size, size) if full else ()
    # The rest of the prompt is in no block of the file; here the last block holds what is left.
    rest = (SPAN - 1 - int(name.rpartition("-")[2]),) if tokens % size else ()
    ids = tuple(number * SPAN + block for block in (*blocks, *rest))
    return TraceRequest(
        id=name,
        arrival_s=seconds(row, "t"),
        input_tokens=tokens,
        output_tokens=max(1, whole_number(row, "out", least=0)),
        blocks=ids,
        block_tokens=size,
        session=session,
    )
