"""Choose the next run and skip those that are done: results are lines of a file.

A second call goes on where the first stopped. A run is done when there is a valid record of it with
the same version of the router, at whatever time scale. An invalid one is tried again, at half the
time scale; a router that did not start is tried again by every call.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from result_lines import append_line, read_lines

from forebay.traces.ground.errors import InputError

FORMAT = 1
Record = dict[str, Any]
IDENTITY = ("engines", "count", "model", "endpoint", "workload", "router", "seed")


def identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in IDENTITY)


def is_done(record: Mapping[str, Any], earlier: Sequence[Record], attempts: int) -> bool:
    """True if the run that `record` identifies (with version and trace) need not be repeated.

    Args:
        attempts: how often an invalid run is tried, by this call and all before it.
    """
    same = _attempts(record, earlier)
    return any(one["verdict"] == "valid" for one in same) or len(same) >= attempts


def next_scale(time_scale: float, record: Mapping[str, Any], earlier: Sequence[Record]) -> float:
    """Half as fast after an invalid run: most often the machine could not keep up."""
    return time_scale / 2 if _attempts(record, earlier) else time_scale


def _attempts(record: Mapping[str, Any], earlier: Sequence[Record]) -> list[Record]:
    return [
        one
        for one in earlier
        if identity(one) == identity(record)
        and one["version"] == record["version"]
        and one.get("trace") == record["trace"]
        and "error" not in one
    ]


def read_records(path: Path) -> list[Record]:
    """The lines of a results file; none where there is no file. Raises InputError."""
    found = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            # The last line of a run that was killed while it wrote.
            raise InputError(f"{path}:{number}: not JSON ({error}); delete this line") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise InputError(
                f"{path}:{number}: not a result of this harness; give another --results"
            )
        found.append(record)
    return found


def append_record(path: Path, record: Record) -> None:
    append_line(path, orjson.dumps({"format": FORMAT, **record}))


def latest(records: Iterable[Record]) -> list[Record]:
    """One record for each identity, whatever its time scale: the last valid one, else the last."""
    chosen: dict[tuple[Any, ...], Record] = {}
    for record in records:
        key = identity(record)
        known = chosen.get(key)
        if known is None or _counts(record) or not _counts(known):
            chosen[key] = record
    return list(chosen.values())


def _counts(record: Record) -> bool:
    return record.get("verdict") == "valid"
