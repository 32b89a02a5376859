"""Read a table of any service by a mapping of its columns. `guess` finds a mapping.

A mapping is written as `arrival=ts:iso8601,input=usage.prompt_tokens,output==128`. Left of
the sign is a target. Right of it is a column, which may be a dotted path, with the unit of a time.
A constant has two signs.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

from forebay.traces.formats.body import build, message_list
from forebay.traces.formats.table import COMPLETION, ReadOptions, TraceFormat, row_format
from forebay.traces.formats.usage import usage_of
from forebay.traces.ground.errors import InputError
from forebay.traces.reading.reader import Ended
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
    """A column with the unit of its times, or a constant.

    `guessed`: its name does not say that it counts tokens, or the unit of its times.
    """

    path: str
    unit: str = "auto"
    constant: bool = False
    guessed: bool = False


Mapping = dict[str, MappedColumn]


def parse_map(text: str) -> Mapping:
    """Read a mapping (InputError: a wrong part, which the message names)."""
    mapping: Mapping = {}
    for part in text.split(","):
        target, sign, column = part.strip().partition("=")
        if target not in TARGETS or not sign or column in ("", "="):
            raise InputError(
                f"--map: {part.strip()!r} is not TARGET=COLUMN[:UNIT]; targets: "
                f"{', '.join(TARGETS)}"
            )
        if column.startswith("="):
            mapping[target] = MappedColumn(column[1:], constant=True)
            continue
        path, colon, unit = column.rpartition(":")
        if not colon or unit not in TIME_UNITS:
            if target in TIMES and colon and re.fullmatch("[a-z0-9]{1,8}", unit):
                raise InputError(
                    f"--map: unit {unit!r} of {target} is not known; one of: "
                    f"{', '.join(TIME_UNITS)}"
                )
            path, unit = column, "auto"
        mapping[target] = MappedColumn(path, "auto" if unit == "epoch" else unit)
    check_map(mapping, "--map")
    return mapping


def check_map(mapping: Mapping, source: str) -> None:
    timed = {"arrival", "end"} & mapping.keys()
    if not timed and (source != "--map" or not {"text", "messages"} & mapping.keys()):
        raise InputError(f"{source}: no time; add arrival=COLUMN or end=COLUMN")
    if not {"input", "usage", "text", "messages"} & mapping.keys():
        raise InputError(f"{source}: no prompt length; add input=COLUMN, text=COLUMN or input==N")


def map_text(mapping: Mapping) -> str:
    """Write a mapping as `--map` reads it."""
    parts = []
    for target, column in mapping.items():
        unit = f":{column.unit}" if column.unit != "auto" else ""
        parts.append(f"{target}={'=' if column.constant else ''}{column.path}{unit}")
    return ",".join(parts)


def doubts(mapping: Mapping) -> list[str]:
    """Return a warning for each guess that would change the load if it were wrong."""
    return [
        f"{column.path} is taken as "
        + (f"{target} in {column.unit}" if target in TIMES else f"{target} tokens")
        + ", which its name does not say; give --map to settle it"
        for target, column in mapping.items()
        if column.guessed
    ]


def mapped_format(mapping: Mapping) -> TraceFormat:
    """Make the reader of a mapping."""

    @row_format(
        name="map",
        what="any table, by a mapping of columns",
        recognise=lambda head: True,
        order=COMPLETION,
        own_ids="id" in mapping,
    )
    def mapped(row: SourceRow, options: ReadOptions) -> Ended:
        # Fields that are plain text.
        texts = ("session", "parent", "tenant", "document", "model", "text")
        values: dict[str, Any] = {target: _text(row, mapping, target) for target in texts}
        # Fields that need a check.
        service_class = _text(row, mapping, "class")
        if service_class not in (None, "interactive", "standard", "batch"):
            raise RowError(
                f"{mapping['class'].path}: {shown(service_class)} is not interactive, standard or "
                "batch"
            )
        values["service_class"] = service_class
        if "messages" in mapping:
            values["messages"] = message_list(row.get(mapping["messages"].path))
            values["text"] = None
        if "stream" in mapping:
            values["stream"] = _flag(row, mapping["stream"].path)
        status = _whole(row, mapping, "status")
        values["status"] = status if status is not None and 100 <= status < 600 else None
        if "deadline" in mapping:
            values["deadline_s"] = _seconds(row, mapping["deadline"])
        # Lengths and times, of which a table may have several forms.
        name = _text(row, mapping, "id") or f"row-{row.number}"
        input_tokens, output = _counted(row, mapping)
        arrival_s, end_s = _times(row, mapping)
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

    return mapped


def _counted(row: SourceRow, mapping: Mapping) -> tuple[int | None, int | None]:
    """Read the lengths of prompt and answer, None where no column has them."""
    input_tokens = _whole(row, mapping, "input")
    output = _whole(row, mapping, "output")
    total = _whole(row, mapping, "total")
    if output is None and total is not None and input_tokens is not None:
        if total < input_tokens:
            raise RowError(f"{mapping['total'].path}: {total} is less than the {input_tokens} in")
        output = total - input_tokens
    if "usage" in mapping:
        path = mapping["usage"].path
        usage = usage_of(row) if path == "*" else usage_of(row, path, flat=False)
        input_tokens = usage.prompt if input_tokens is None else input_tokens
        output = usage.answer if output is None else output
    return input_tokens, output


def _times(row: SourceRow, mapping: Mapping) -> tuple[float, float | None]:
    """Read the arrival, and the end if the table has it."""
    duration_s = _seconds(row, mapping["duration"]) if "duration" in mapping else None
    end_s = None
    if "end" in mapping:
        end_s = row.moment(mapping["end"].path, unit=mapping["end"].unit)
    if "arrival" in mapping:
        arrival_s = row.moment(mapping["arrival"].path, unit=mapping["arrival"].unit)
        return arrival_s, arrival_s + duration_s if duration_s is not None else end_s
    if end_s is None:
        return row.second(), None
    return end_s - (duration_s or 0.0), end_s


def _seconds(row: SourceRow, column: MappedColumn) -> float:
    return row.seconds(column.path, unit=column.unit if column.unit in UNITS else "s")


def _text(row: SourceRow, mapping: Mapping, target: str) -> str | None:
    if target not in mapping:
        return None
    column = mapping[target]
    if column.constant:
        return column.path
    if target == "text":  # a prompt may be a word that elsewhere means no value
        prompt = row.get(column.path)
        return None if prompt is None else str(prompt)
    return row.text(column.path)


def _whole(row: SourceRow, mapping: Mapping, target: str) -> int | None:
    if target not in mapping:
        return None
    column = mapping[target]
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
