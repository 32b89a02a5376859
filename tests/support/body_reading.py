"""Bodies as the proxy reads them, with the settings of a test."""

from collections.abc import Mapping
from typing import Any

from forebay.proxy.api.body import ParsedBody, read_fields
from forebay.proxy.api.dialects import CHAT, COMPLETIONS, Dialect
from forebay.proxy.api.json_body import parse
from forebay.proxy.api.token_estimate import TokenEstimate


def read_body(
    asked: dict[str, Any] | bytes,
    dialect: Dialect | None = None,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    **settings: Any,
) -> ParsedBody:
    """Read a body, or fields of which `body` has the bytes. Messages without a dialect are a chat.

    Raises:
        ApiError: as for a client.
    """
    fields = parse(asked) if isinstance(asked, bytes) else asked
    return read_fields(
        fields,
        asked if isinstance(asked, bytes) else body,
        headers or {},
        id_="r",
        dialect=dialect or (CHAT if "messages" in fields else COMPLETIONS),
        **{"estimate": TokenEstimate(4.0), "block_bytes": 256, **settings},
    )
