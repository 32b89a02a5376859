"""Read fields of a request as vLLM reads them, and add fields to a body."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from forebay.proxy.api.json_body import LongText
from forebay.proxy.backends.salt_support import FIELD as SALT
from forebay.proxy.http1.errors import invalid_type

BEYOND_64_BITS = 2.0**64
# vLLM's own readers of its requests.
_WHOLE_NUMBER = TypeAdapter(int)
_BOOLEAN = TypeAdapter(bool)


def integer(fields: dict[str, Any], name: str, default: int) -> int:
    """Return a whole number as vLLM reads it: 100.0 and "100" are 100. Raises ApiError 400."""
    value = fields.get(name)
    if type(value) is int and abs(value) < BEYOND_64_BITS:
        return value
    if value is None:
        return default
    try:
        if not isinstance(value, int) or isinstance(value, bool):
            return _WHOLE_NUMBER.validate_python(value)
    except ValidationError:
        pass
    raise invalid_type(name, "a whole number", name)


def boolean(fields: dict[str, Any], name: str) -> bool:
    """Return a field as vLLM reads it: "true", "on" and 1 are True. Raises ApiError 400."""
    value = fields.get(name)
    if value is None or value is False:
        return False
    if value is True:
        return True
    try:
        return _BOOLEAN.validate_python(value)
    except ValidationError:
        raise invalid_type(name, "true or false", name) from None


def string(fields: dict[str, Any], name: str, default: str | None = "") -> Any:
    """Return a field with a text, or `default` without it. Raises ApiError 400."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, LongText):
        return str(value)
    if not isinstance(value, str):
        raise invalid_type(name, "a string", name)
    return value


def client_salt(fields: dict[str, Any]) -> str | None:
    """Return the salt that the client gave, or None. Raises ApiError 400."""
    salt = string(fields, SALT, None)
    if salt == "":
        raise invalid_type(SALT, "a string that is not empty", SALT)
    return salt  # type: ignore[no-any-return]


def with_members(body: bytes, members: dict[str, str], *, empty: bool = False) -> bytes:
    """Return `body` with `members` as its last members, without a second pass over a long prompt.

    The last of several equal keys counts, in vLLM's parsers as in ours. So a member overrides the
    client's member, however its key is spelled.

    Args:
        body: a valid JSON object.
        members: JSON by name.
        empty: the object has no members.
    """
    if not members:
        return body
    end = body.rfind(b"}")  # 15 MB of white space may follow the brace
    added = ",".join(f'"{name}":{value}' for name, value in members.items())
    tail = f"{'' if empty else ','}{added}}}"
    return b"".join((memoryview(body)[:end], tail.encode()))  # copied once
