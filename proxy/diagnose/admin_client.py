"""Ask the admin port of a running proxy, for the commands `explain`, `doctor` and `top`."""

import json
from http.client import HTTPException
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import typer

from forebay.traces.ground.command_line.messages import all_printable, printable
from forebay.traces.ground.errors import InputError

DEFAULT_ADMIN = "http://127.0.0.1:9090"
ANSWER_S = 5.0
MOST_BYTES = 16 << 20
MISTAKES = 400, 408, 413, 415, 429  # faults of the sent body, which the message describes

AdminUrl = Annotated[str, typer.Option(help="the proxy's admin port")]


class Unreachable(InputError):
    """Nothing answers there, or a server that is not an admin port."""


class Refused(InputError):
    """The admin port answered with an error of its own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def ask(admin: str, target: str, body: bytes | None = None) -> bytes:
    """Return the body of the answer. Raises InputError.

    Args:
        target: path and query.
        body: sent as JSON in a POST. None sends a GET.
    """
    if not _is_url(admin):
        raise InputError(f"--admin {admin}: give a URL such as {DEFAULT_ADMIN}")
    headers = {"content-type": "application/json"} if body is not None else {}
    request = Request(f"{admin.rstrip('/')}{target}", body, headers)
    try:
        # Without the HTTP proxies of the environment: the admin port is near.
        with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_S) as answer:
            return bytes(answer.read(MOST_BYTES))
    except HTTPError as error:
        with error:
            raise _refusal(admin, error.code, error.read(MOST_BYTES)) from None
    except (URLError, OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason
        raise Unreachable(
            f"--admin {admin}: no answer ({reason}); is it the admin port of a running proxy?"
        ) from None


def cleaned_json(body: bytes) -> Any:
    """Parse JSON that may hold names of servers and clients. Raises ValueError."""
    return all_printable(json.loads(body))


def ask_json(admin: str, target: str, key: str, body: bytes | None = None) -> dict[str, Any]:
    """Return an answer in JSON that has `key`. Raises InputError."""
    try:
        fields = cleaned_json(ask(admin, target, body))
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or key not in fields:
        raise Unreachable(f"--admin {admin}: not the admin port of a Forebay of this version")
    return fields


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bad address in brackets, or a bad port
        return False


def _refusal(admin: str, status: int, body: bytes) -> InputError:
    """Return the error as the admin port words it, or Unreachable for another server's error."""
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), printable(str(error["message"]))
    except (ValueError, KeyError, TypeError):
        code = ""
    if code in ("unknown_request", "unknown_backend", "no_worker") or (code and status in MISTAKES):
        return Refused(code, message)
    return Unreachable(
        f"--admin {admin}: answered {status}; is it the admin port of a running proxy?"
    )
