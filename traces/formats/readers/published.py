"""Read traces with one row a request: Azure, BurstGPT, vidur, sarathi, Forebay's CSV."""

from dataclasses import replace

from forebay.traces.formats.columns import mapped_format, parse_map
from forebay.traces.formats.table import CSV_COLUMNS, ReadOptions, row_format
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.reader import Order
from forebay.traces.rows import RowError, SourceRow


@row_format(
    name="azure",
    what="Azure LLM inference traces of 2023 and 2024, and the multimodal one of 2025",
    keeps="nothing more",
    recognise=lambda head: head.has("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
)
def azure(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read times of six or seven digits, with an offset only in 2024. Prompts share nothing."""
    if row.whole_or(0, "NumImages"):
        row.note("rows with images, which are not kept")
    return TraceRequest(
        id=f"azure-{row.number}",
        arrival_s=row.moment("TIMESTAMP", unit="iso8601"),
        input_tokens=row.whole("ContextTokens", least=1),
        output_tokens=row.whole("GeneratedTokens"),
    )


@row_format(
    name="burstgpt",
    what="BurstGPT, versions 1 to 3, with or without failures",
    keeps="model, sessions, failures",
    recognise=lambda head: head.has("Timestamp", "Request tokens", "Response tokens"),
)
def burstgpt(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read all versions. An answer of 0 tokens is a failure: an arrival with status 500."""
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
        parent=row.turn_before(session, name),
        status=None if output_tokens else 500,
    )


@row_format(
    name="vidur",
    what="vidur and sarathi CSV, with or without arrival times",
    recognise=lambda head: head.has("num_prefill_tokens", "num_decode_tokens"),
    order=Order(rebase=False),
)
def vidur(row: SourceRow, options: ReadOptions) -> TraceRequest:
    """Read lengths. Rows without times are a second apart. A replay sets its own rate."""
    return TraceRequest(
        id=f"vidur-{row.number}",
        arrival_s=row.seconds("arrived_at") if "arrived_at" in row.values else row.second(),
        input_tokens=row.whole("num_prefill_tokens", least=1),
        output_tokens=row.whole("num_decode_tokens"),
    )


forebay_csv = replace(
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
)
