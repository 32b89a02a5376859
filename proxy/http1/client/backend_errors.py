"""The faults that can happen between this proxy and a backend."""

import zlib

import httptools


class UpstreamFault(Exception):
    """The backend did not answer as it should."""


class ConnectFault(UpstreamFault):
    """No connection: refused, unreachable or too slow."""


class NameFault(ConnectFault):
    """No address of the backend's name is known, now or from earlier."""


class TlsFault(ConnectFault):
    """TLS failed. The message is OpenSSL's own, without addresses."""


class LocalShortage(UpstreamFault):
    """This machine lacks a resource for a connection. The backend is not to blame."""


class BrokenAnswer(UpstreamFault):
    """The response is not HTTP, or HTTP that could be read in two ways.

    Attributes:
        kind: a label for log and metrics.
    """

    def __init__(self, message: str, kind: str = "bad_http") -> None:
        super().__init__(message)
        self.kind = kind


class OwnLimit(UpstreamFault):
    """A limit of this proxy ended the response. The message is a sentence that names its key."""


class AnswerTooLarge(OwnLimit):
    """The body has more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The response is larger than {limit} bytes (limits.answer).")


class LostConnection(UpstreamFault):
    """The connection ended before the response did.

    Attributes:
        stale: a kept connection ended before the first byte of the response. Perhaps that is a
            race: backends close idle connections.
    """

    def __init__(self, stale: bool) -> None:
        super().__init__("the connection was lost")
        self.stale = stale


def read_fault(error: BaseException) -> BaseException:
    """Return the exception that reading the response raises after an error of the parser.

    An exception of ours in a sink comes through the parser, too: the backend is not to blame.
    """
    cause = error
    if isinstance(error, httptools.HttpParserCallbackError) and error.__context__ is not None:
        cause = error.__context__
    if isinstance(cause, (httptools.HttpParserError, httptools.HttpParserUpgrade, zlib.error)):
        kind = "bad_coding" if isinstance(cause, zlib.error) else "bad_http"
        return BrokenAnswer(f"not HTTP: {type(cause).__name__}", kind)
    return cause
