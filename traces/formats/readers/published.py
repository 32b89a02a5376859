"""Read traces with one row a request: Azure, BurstGPT, vidur, sarathi, Forebay's CSV."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from forebay.traces.formats.columns import mapped_format, parse_map
from forebay.traces.formats.head import Head
from forebay.traces.formats.table import CSV_COLUMNS, ReadOptions, TraceFormat
from forebay.traces.reading.reader import Order, ParseRow
from forebay.traces.rows import RowError, SourceRow
from forebay.traces.schema import TraceRequest


def _azure(options: ReadOptions) -> ParseRow:
    """Read times of six or seven digits, with an offset only in 2024. Prompts share nothing."""

    def parse(row: SourceRow) -> TraceRequest:
        if row.whole_or(0, "NumImages"):
            row.note("rows with images, which are not kept")
        return TraceRequest(
            id=f"azure-{row.number}",
            arrival_s=row.moment("TIMESTAMP", unit="iso8601"),
            input_tokens=row.whole("ContextTokens", least=1),
            output_tokens=row.whole("GeneratedTokens"),
        )

    return parse


def _burstgpt(options: ReadOptions) -> ParseRow:
    """Read all versions. An answer of 0 tokens is a failure: an arrival with status 500."""
    turns = LastTurns()

    def parse(row: SourceRow) -> TraceRequest:
        output_tokens = row.whole("Response tokens")
        total = row.whole_or(None, "Total tokens")
        input_tokens = row.whole("Request tokens", least=1)
        if total is not None and total != input_tokens + output_tokens:
            raise RowError(f"Total tokens: {total} is not {input_tokens} + {output_tokens}")
        session = row.text("Session ID")
        name = f"burstgpt-{row.number}"
        return TraceRequest(
            id=name,
            arrival_s=row.seconds("Timestamp"),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            model=row.text("Model"),
            session=session,
            parent=turns.after(session, name),
            status=None if output_tokens else 500,
        )

    return parse


class LastTurns:
    """Remembers the last turn of each session, so that the next turn can name it."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def after(self, session: str | None, name: str) -> str | None:
        """Return the turn before `name`, which is now the last of `session`."""
        if session is None:
            return None
        before = self._last.get(session)
        self._last[session] = name
        return before


def _lengths(options: ReadOptions) -> ParseRow:
    """Read lengths. Rows without times are a second apart. A replay sets its own rate."""
    numbers: Iterator[int] = count()

    def parse(row: SourceRow) -> TraceRequest:
        index = next(numbers)
        timed = "arrived_at" in row.values
        return TraceRequest(
            id=f"vidur-{row.number}",
            arrival_s=row.seconds("arrived_at") if timed else float(index),
            input_tokens=row.whole("num_prefill_tokens", least=1),
            output_tokens=row.whole("num_decode_tokens"),
        )

    return parse


def _has_azure(head: Head) -> bool:
    return head.has("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _has_burstgpt(head: Head) -> bool:
    return head.has("Timestamp", "Request tokens", "Response tokens")


def _has_lengths(head: Head) -> bool:
    return head.has("num_prefill_tokens", "num_decode_tokens")


FORMATS = (
    TraceFormat(
        name="azure",
        what="Azure LLM inference traces of 2023 and 2024, and the multimodal one of 2025",
        keeps="nothing more",
        recognise=_has_azure,
        parser=_azure,
    ),
    TraceFormat(
        name="burstgpt",
        what="BurstGPT, versions 1 to 3, with or without failures",
        keeps="model, sessions, failures",
        recognise=_has_burstgpt,
        parser=_burstgpt,
    ),
    TraceFormat(
        name="vidur",
        what="vidur and sarathi CSV, with or without arrival times",
        recognise=_has_lengths,
        parser=_lengths,
        order=Order(rebase=False),
    ),
    replace(
        mapped_format(
            parse_map(
                "arrival=arrival_s:s,input=input_tokens,output=output_tokens,id=id,session=session,"
                "tenant=tenant,document=document,class=service_class,model=model,status=status"
            )
        ),
        name="forebay-csv",
        what="the CSV that `traces export csv` writes",
        keeps="sessions, tenant, document, class, model, status",
        recognise=lambda head: head.line == ",".join(CSV_COLUMNS),
        order=Order(),
    ),
)
