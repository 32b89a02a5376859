"""Write one request as a line of Forebay's own trace format (`traces/reading/jsonl`)."""

from typing import Any

import orjson

from forebay.traces.ground.schema import BLOCK_TOKENS, TraceRequest

FIRST_TEXT = ("text", "session", "tenant", "document", "service_class")
LATER_KEYS = TraceRequest.__slots__[11:]


def row_bytes(request: TraceRequest) -> bytes:
    """Write `request` as one line of the format, with its newline."""
    row: dict[str, Any] = {
        "id": request.id,
        "arrival_s": float(request.arrival_s),
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
    }
    if request.blocks is not None:
        row["blocks"] = request.blocks
    if request.block_tokens != BLOCK_TOKENS:
        row["block_tokens"] = request.block_tokens
    for key in FIRST_TEXT:
        value = getattr(request, key)
        if value is not None:
            row[key] = value
    for key in LATER_KEYS:
        value = getattr(request, key)
        if value is not None and value != () and value is not True:
            row[key] = value
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
