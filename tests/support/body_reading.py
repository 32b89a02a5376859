"""Bodies as the proxy reads them, with the settings of a test."""

from collections.abc import Mapping
from typing import Any

from forebay.proxy.api.body import ParsedBody, ReadSettings, read_fields
from forebay.proxy.api.cache_salt import CacheSalts
from forebay.proxy.api.dialects import CHAT, COMPLETIONS, Dialect
from forebay.proxy.api.json_body import parse
from forebay.proxy.api.token_estimate import TokenEstimate


def read_body(
    asked: dict[str, Any] | bytes,
    dialect: Dialect | None = None,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    tenant: str = "",
    salts: CacheSalts | None = None,
    ignore_salt: frozenset[str] = frozenset(),
    **settings: Any,
) -> ParsedBody:
    """Read a body, or fields of which `body` has the bytes. Messages without a dialect are a chat.

    Raises:
        ApiError: as for a client.
    """
    fields = parse(asked) if isinstance(asked, bytes) else asked
    return read_fields(
        ReadSettings(**{"estimate": TokenEstimate(4.0), "block_bytes": 256, **settings}),
        fields,
        asked if isinstance(asked, bytes) else body,
        headers or {},
        id_="r",
        dialect=dialect or (CHAT if "messages" in fields else COMPLETIONS),
        tenant=tenant,
        salts=salts,
        ignore_salt=ignore_salt,
    )
