"""Prepare the body of a request that is not shaped: its model, and its tenant's cache salt."""

import re

from forebay.proxy.api.body import client_salt, parse_any, reject_media_ids, with_model
from forebay.proxy.api.cache_salt import CacheSalts, with_salt
from forebay.proxy.models import Models

_FORM_MODEL = re.compile(
    rb'^content-disposition:[^\r\n]*;[ ]*name="?model"?(?:;[^\r\n]*)?\r\n'
    rb"(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n--",
    re.IGNORECASE | re.MULTILINE,
)


async def prepared(
    body: bytes, content_type: str, tenant: str, salts: CacheSalts | None, models: Models
) -> tuple[bytes, str]:
    """Prepare the body of a request that is not shaped; raises ApiError 400.

    Forms (audio) get no salt: vLLM reads none from them.

    Returns:
        The body, with the backends' name of the model and the tenant's salt, and what
        `Request.model` would be.
    """
    if content_type == "multipart/form-data":
        return _form(body, models)
    fields = await parse_any(body)
    body, wanted = with_model(fields, body, models)
    if salts is not None:
        reject_media_ids(fields)
        body = with_salt(body, salts.salt(tenant, client_salt(fields)), empty=not fields)
    return body, wanted.route


def _form(body: bytes, models: Models) -> tuple[bytes, str]:
    """Do the same with a form: its part `model` is a line of text."""
    found = _FORM_MODEL.search(body)
    if found is None:
        return body, ""
    asked = found[1].decode(errors="replace")
    wanted = models.find(asked)
    if wanted.name != asked:
        body = b"".join((body[: found.start(1)], wanted.name.encode(), body[found.end(1) :]))
    return body, wanted.route
