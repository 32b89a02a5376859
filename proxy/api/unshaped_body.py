"""Prepare the body of a request that is not shaped: its model, and its tenant's cache salt."""

from email.message import Message

from forebay.proxy.api.body import as_utf8, client_salt, parse_any, reject_media_ids, with_model
from forebay.proxy.api.cache_salt import CacheSalts, with_salt
from forebay.proxy.backends.models import Models, Wanted

MOST_PARTS = 16  # of a form that are looked at
HEADER_BYTES = 1 << 10  # of a part


async def prepared(
    body: bytes,
    content_type: str,
    tenant: str,
    salts: CacheSalts | None,
    models: Models,
    *,
    form: bool = True,
    names_model: bool = False,
) -> tuple[bytes, Wanted]:
    """Prepare the body of a request that is not shaped; raises ApiError 400.

    Forms (audio) get no salt: vLLM reads none from them.

    Args:
        content_type: the whole header.
        form: a body of this path may be a form. Then it is one if the header says so.
        names_model: the model of a form is wanted even where no other name stands for it.

    Returns:
        The body, with the backends' name of the model and the tenant's salt, and that model.
    """
    # JSON under the header of a form would pass without the salt of its tenant.
    if form and is_form(content_type) and not body.lstrip(b" \t\r\n").startswith(b"{"):
        wants_model = models.matter or names_model
        return _form(body, content_type, models) if wants_model else (body, Wanted(""))
    body = as_utf8(body)
    fields = await parse_any(body)
    body, wanted = with_model(fields, body, models)
    if salts is not None:
        reject_media_ids(fields)
        body = with_salt(body, salts.salt(tenant, client_salt(fields)), empty=not fields)
    return body, wanted


def is_form(content_type: str) -> bool:
    """Return whether the header says that the body is a form."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def _form(body: bytes, content_type: str, models: Models) -> tuple[bytes, Wanted]:
    """Do the same with a form: its part `model` is a line of text."""
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
            wanted = models.find(value.decode(errors="replace"))
            if wanted.name.encode() != value:
                body = b"".join((body[: head_end + 4], wanted.name.encode(), body[end:]))
            return body, wanted
        start = end + 2
    return body, Wanted("")


def _part_name(head: bytes) -> str:
    for line in head.decode("latin-1").split("\r\n"):
        field, _, value = line.partition(":")
        if field.strip().lower() == "content-disposition":
            return _parameter(field.strip(), value.strip(), "name")
    return ""


def _parameter(field: str, value: str, name: str) -> str:
    """Return a parameter of a header, "" if it has none."""
    message = Message()
    message[field] = value
    found = message.get_param(name, "", header=field)
    return found if isinstance(found, str) else ""
