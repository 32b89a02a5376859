"""Read a table of any service by a mapping of its columns; `guess` finds one.

A mapping is written as `arrival=ts:iso8601,input=usage.prompt_tokens,output==128`. A target stands
left of the sign. Right of it stands a column, which may be a dotted path, and the unit of a time. A
constant has two signs.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

from forebay.traces.errors import InputError
from forebay.traces.formats.body import build, message_list
from forebay.traces.formats.table import COMPLETION, ReadOptions, TraceFormat
from forebay.traces.formats.usage import usage_of
from forebay.traces.reading.reader import Ended, ParseRow
from forebay.traces.rows import UNITS, RowError, SourceRow, shown

TARGETS: Final = {
    "arrival": "time of arrival",
    "end": "time of the end",
    "duration": "from arrival to end",
    "input": "input tokens",
    "output": "output tokens",
    "total": "input and output tokens, if there is no `output`",
    "usage": "object of token counts that add up to input and output; `*` is the row itself",
    "id": "name of the request",
    "session": "conversation",
    "parent": "id of the turn before",
    "tenant": "customer",
    "document": "document that the prompt is about",
    "class": "interactive, standard or batch",
    "model": "model",
    "text": "the prompt",
    "messages": "the messages of a chat",
    "status": "HTTP status of the answer",
    "stream": "whether the answer was streamed",
    "deadline": "when the client gives up, after arrival",
}
TIMES: Final = ("arrival", "end", "duration", "deadline")
TIME_UNITS: Final = (*UNITS, "iso8601", "epoch", "auto")


@dataclass(frozen=True, slots=True)
class MappedColumn:
    """A column with the unit of its times; or a constant."""

    path: str
    unit: str = "auto"
    constant: bool = False


Mapping = dict[str, MappedColumn]


def parse_map(text: str) -> Mapping:
    """Read a mapping; InputError names the part that is wrong."""
    found: Mapping = {}
    for part in text.split(","):
        target, sign, column = part.strip().partition("=")
        if target not in TARGETS or not sign or column in ("", "="):
            raise InputError(
                f"--map: {part.strip()!r} is not TARGET=COLUMN[:UNIT]; targets: "
                f"{', '.join(TARGETS)}"
            )
        if column.startswith("="):
            found[target] = MappedColumn(column[1:], constant=True)
            continue
        path, colon, unit = column.rpartition(":")
        if not colon or unit not in TIME_UNITS:
            if target in TIMES and colon and re.fullmatch("[a-z0-9]{1,8}", unit):
                raise InputError(
                    f"--map: unit {unit!r} of {target} is not known; one of: "
                    f"{', '.join(TIME_UNITS)}"
                )
            path, unit = column, "auto"
        found[target] = MappedColumn(path, "auto" if unit == "epoch" else unit)
    check_map(found, "--map")
    return found


def check_map(found: Mapping, source: str) -> None:
    if not {"arrival", "end"} & found.keys():
        raise InputError(f"{source}: no time; add arrival=COLUMN or end=COLUMN")
    if not {"input", "usage", "text", "messages"} & found.keys():
        raise InputError(f"{source}: no prompt length; add input=COLUMN, text=COLUMN or input==N")


def map_text(found: Mapping) -> str:
    """Write a mapping as `--map` reads it."""
    parts = []
    for target, one in found.items():
        unit = f":{one.unit}" if one.unit != "auto" else ""
        parts.append(f"{target}={'=' if one.constant else ''}{one.path}{unit}")
    return ",".join(parts)


def mapped_format(found: Mapping) -> TraceFormat:
    """Make the reader of a mapping."""
    return TraceFormat(
        name="map",
        what="any table, by a mapping of columns",
        recognise=lambda head: True,
        parser=lambda options: _parser(found, options),
        order=COMPLETION,
        own_ids="id" in found,
    )


def _parser(found: Mapping, options: ReadOptions) -> ParseRow:
    def parse(row: SourceRow) -> Ended:
        values: dict[str, Any] = {
            key: _text(row, found, target)
            for key, target in (
                ("session", "session"), ("parent", "parent"), ("tenant", "tenant"),
                ("document", "document"), ("model", "model"), ("text", "text"),
            )
        }  # fmt: skip
        service_class = _text(row, found, "class")
        if service_class not in (None, "interactive", "standard", "batch"):
            raise RowError(
                f"{found['class'].path}: {shown(service_class)} is not interactive, standard or "
                "batch"
            )
        values["service_class"] = service_class
        if "messages" in found:
            values["messages"] = message_list(row.get(found["messages"].path))
            values["text"] = None
        if "stream" in found:
            values["stream"] = _flag(row, found["stream"].path)
        status = _whole(row, found, "status")
        values["status"] = status if status is not None and 100 <= status < 600 else None
        if "deadline" in found:
            values["deadline_s"] = _seconds(row, found["deadline"])
        name = _text(row, found, "id") or f"row-{row.number}"
        input_tokens, output = _counted(row, found)
        arrival_s, end_s = _times(row, found)
        request = build(
            row,
            values,
            options,
            name=name,
            arrival_s=arrival_s,
            input_tokens=input_tokens,
            output_tokens=output,
        )
        return Ended(request, end_s)

    return parse


def _counted(row: SourceRow, found: Mapping) -> tuple[int | None, int | None]:
    """Read the lengths of prompt and answer, None where no column tells."""
    input_tokens = _whole(row, found, "input")
    output = _whole(row, found, "output")
    total = _whole(row, found, "total")
    if output is None and total is not None and input_tokens is not None:
        if total < input_tokens:
            raise RowError(f"{found['total'].path}: {total} is less than the {input_tokens} in")
        output = total - input_tokens
    if "usage" in found:
        path = found["usage"].path
        usage = usage_of(row) if path == "*" else usage_of(row, path, flat=False)
        input_tokens = usage.prompt if input_tokens is None else input_tokens
        output = usage.answer if output is None else output
    return input_tokens, output


def _times(row: SourceRow, found: Mapping) -> tuple[float, float | None]:
    """Read arrival and, if the table has it, the end."""
    duration_s = _seconds(row, found["duration"]) if "duration" in found else None
    end_s = None
    if "end" in found:
        end_s = row.moment(found["end"].path, unit=found["end"].unit)
    if "arrival" in found:
        arrival_s = row.moment(found["arrival"].path, unit=found["arrival"].unit)
        return arrival_s, arrival_s + duration_s if duration_s is not None else end_s
    assert end_s is not None  # `check_map` asks for one of the two
    return end_s - (duration_s or 0.0), end_s


def _seconds(row: SourceRow, column: MappedColumn) -> float:
    return row.seconds(column.path, unit=column.unit if column.unit in UNITS else "s")


def _text(row: SourceRow, found: Mapping, target: str) -> str | None:
    if target not in found:
        return None
    column = found[target]
    return column.path if column.constant else row.text(column.path)


def _whole(row: SourceRow, found: Mapping, target: str) -> int | None:
    if target not in found:
        return None
    column = found[target]
    if column.constant:
        if not column.path.isdecimal():
            raise RowError(f"--map: {target}=={column.path} is not a whole number", fatal=True)
        return int(column.path)
    return row.whole_or(None, column.path)


def _flag(row: SourceRow, column: str) -> bool:
    value = str(row.get(column)).lower()
    if value in ("true", "1", "yes"):
        return True
    if value in ("false", "0", "no", "none"):
        return False
    raise RowError(f"{column}: {shown(row.get(column))} is not true or false")
