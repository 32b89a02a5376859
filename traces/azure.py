"""Read the Azure LLM inference traces: arrival times and lengths only, no prompts.

The files are CSV with the header `TIMESTAMP,ContextTokens,GeneratedTokens`. Times of 2023 have
seven fractional digits (the last is always 0; Python keeps six), those of 2024 six or none and a
UTC offset. The files do not tell which prompts share a prefix, so replayed prompts share nothing.
Source: Azure/AzurePublicDataset.
"""

import re
from datetime import UTC, datetime
from pathlib import Path

from forebay.traces.reader import RowError, TraceReader
from forebay.traces.schema import TraceRequest

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_BEYOND_MICROSECONDS = re.compile(r"(\.[0-9]{6})[0-9]+")


def read_azure(path: str | Path, *, skip_bad: bool = False) -> TraceReader:
    """Open `path` as a stream of requests; the first arrives at 0, ids are `azure-LINE`."""
    return TraceReader(path, _AzureRows().parse, skip_bad=skip_bad)


class _AzureRows:
    def __init__(self) -> None:
        self._headed = False
        self._start: datetime | None = None

    def parse(self, line: bytes, number: int) -> TraceRequest | None:
        if not self._headed:
            header = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
            if header != HEADER:
                raise RowError(f"header {header[:60]!r} is not {HEADER!r}", fatal=True)
            self._headed = True
            return None
        fields = line.decode("utf-8", "replace").split(",")
        if len(fields) != 3:
            raise RowError(f"{len(fields)} fields, not the three of {HEADER}")
        when = _moment(fields[0])
        request = TraceRequest(
            id=f"azure-{number}",
            arrival_s=(when - (self._start or when)).total_seconds(),
            input_tokens=_tokens("ContextTokens", fields[1], least=1),
            output_tokens=_tokens("GeneratedTokens", fields[2], least=0),
        )
        self._start = self._start or when
        return request


def _moment(text: str) -> datetime:
    try:
        when = datetime.fromisoformat(_BEYOND_MICROSECONDS.sub(r"\1", text))
    except ValueError as error:
        raise RowError(
            f"TIMESTAMP: {text[:60]!r} is not a time like 2023-11-16 18:17:03.9799600"
        ) from error
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _tokens(column: str, text: str, *, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least:
        raise RowError(f"{column}: {text[:60]!r} is not a whole number of {least} or more")
    return int(text)
