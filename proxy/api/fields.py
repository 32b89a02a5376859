"""Read fields of a request as vLLM reads them, and add a field to a body."""

from typing import Any

from pydantic import TypeAdapter, ValidationError

from forebay.proxy.api.json_body import LongText
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


def with_member(body: bytes, name: str, value: str, *, empty: bool = False) -> bytes:
    """Return `body` with `name` as its last member, without a second pass over a long prompt.

    The last of several equal keys counts, in vLLM's parsers as in ours. So this overrides the
    client's member, however its key is spelled.

    Args:
        body: a valid JSON object.
        value: JSON.
        empty: the object has no members.
    """
    end = len(body) - 1
    while body[end] != 0x7D:  # white space may follow the brace
        end -= 1
    member = f'{"" if empty else ","}"{name}":{value}}}'
    return b"".join((memoryview(body)[:end], member.encode()))  # copied once
