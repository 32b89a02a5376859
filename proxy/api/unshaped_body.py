"""Prepare the body of a request that is not shaped: its model, and its tenant's cache salt."""

from email.message import Message

from forebay.proxy.api.body import reject_media_ids
from forebay.proxy.api.cache_salt import CacheSalts
from forebay.proxy.api.fields import client_salt, string, with_members
from forebay.proxy.api.json_body import as_utf8, parse_any
from forebay.proxy.backends.models import Models, Wanted
from forebay.proxy.backends.salt_support import FIELD as SALT
from forebay.proxy.http1.errors import ApiError

MOST_PARTS = 16  # parts of a form that are searched for the model
HEADER_BYTES = 1 << 10  # bound of the header of a part, and of the name of a model


async def prepared(
    body: bytes,
    content_type: str,
    tenant: str,
    salts: CacheSalts | None,
    models: Models,
    *,
    form: bool = True,
    names_model: bool = False,
    must: bool = True,
) -> tuple[bytes, Wanted]:
    """Prepare the body of a request that is not shaped. Raises ApiError 400.

    Forms (audio) get no salt, because vLLM does not read a salt from them.

    Args:
        content_type: the whole header.
        form: the path may have forms as bodies. Then the header decides.
        names_model: find the model of a form even where no model has an alias.
        must: raise for a body that cannot be read, instead of returning it as it is.

    Returns:
        The body, with the backends' name of the model and the tenant's salt, and that model.
    """
    # JSON under the header of a form would pass without the salt of its tenant.
    if form and is_form(content_type) and not body.lstrip(b" \t\r\n").startswith(b"{"):
        wants_model = models.matter or names_model
        return _form(body, content_type, models) if wants_model else (body, Wanted(""))
    members: dict[str, str] = {}
    try:
        fields = await parse_any(as_utf8(body))
        model = models.of_body(string(fields, "model"), members)
    except ApiError:
        if must:
            raise
        return body, Wanted("")
    body = as_utf8(body)
    if salts is not None:
        reject_media_ids(fields)
        members[SALT] = f'"{salts.salt(tenant, client_salt(fields))}"'
    return with_members(body, members, empty=not fields), model


def is_form(content_type: str) -> bool:
    """True if the header says that the body is a form."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def _form(body: bytes, content_type: str, models: Models) -> tuple[bytes, Wanted]:
    """Prepare a form, whose part `model` is a line of text."""
    boundary = _parameter("content-type", content_type, "boundary")
    delimiter = b"--" + boundary.encode("utf-8", "surrogateescape")
    start = body.find(delimiter) if boundary else -1
    for _ in range(MOST_PARTS):
        head_end = body.find(b"\r\n\r\n", start, start + HEADER_BYTES)
        end = body.find(b"\r\n" + delimiter, head_end)
        if min(start, head_end, end) < 0:
            break
        if _part_name(body[start:head_end]) == "model" and end - head_end < HEADER_BYTES:
            value = body[head_end + 4 : end]
            model = models.find(value.decode(errors="replace"))
            if model.name.encode() != value:
                body = b"".join((body[: head_end + 4], model.name.encode(), body[end:]))
            return body, model
        start = end + 2
    return body, Wanted("")


def _part_name(head: bytes) -> str:
    for line in head.decode("latin-1").split("\r\n"):
        field, _, value = line.partition(":")
        if field.strip().lower() == "content-disposition":
            return _parameter(field.strip(), value.strip(), "name")
    return ""


def _parameter(field: str, value: str, name: str) -> str:
    """Return a parameter of a header, or ""."""
    message = Message()
    message[field] = value
    parameter = message.get_param(name, "", header=field)
    return parameter if isinstance(parameter, str) else ""
