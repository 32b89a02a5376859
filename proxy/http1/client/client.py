"""Ask a backend over HTTP/1.1, on connections that are kept alive."""

import asyncio
import errno
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from forebay.proxy.http1.client.backend_errors import (
    AnswerTooLarge,
    ConnectFault,
    LocalShortage,
    NameFault,
    TlsFault,
)
from forebay.proxy.http1.client.connection import Connection, UpstreamResponse
from forebay.proxy.http1.client.dns_cache import HostName
from forebay.proxy.http1.server.read_turns import ReadTurns

NO_HEADERS: Mapping[str, str] = {}
IDLE_S = 3.0  # vLLM closes idle connections after 5 s: those kept must be younger

# Errors of this machine: no descriptor, memory or local port left. glibc reports EBUSY when it has
# none left for a name look-up.
_OURS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EBUSY}
)


class Origin:
    """One backend's address, and the idle connections to it. Use from one event loop only.

    Args:
        url: such as http://127.0.0.1:8001. Its path, if any, is put in front of every target.
        connect_s: time limit of connecting, TLS included.
        tls: checks of an https URL; by default the system's authorities.
        headers: sent with every request.

    Attributes:
        key: the header with the proxy's own key, sent with every request that brings no key.
    """

    def __init__(
        self,
        url: str,
        connect_s: float,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._prefix = parts.path.rstrip("/")
        self._name = HostName(parts.hostname, self._loop)
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        host = parts.netloc.rpartition("@")[2]
        # Without the second header any compression is acceptable (RFC 9110, 12.5.3).
        own = {"host": host, "accept-encoding": "identity", **headers}
        self._own_headers = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        self.connect_s = connect_s
        self.key = NO_HEADERS
        self._turns = ReadTurns(self._loop)
        self._idle: list[Connection] = []
        self._closed = False

    async def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] = NO_HEADERS,
        body: bytes = b"",
        *,
        fresh: bool = False,
        wrote: Callable[[], None] | None = None,
    ) -> UpstreamResponse:
        """Send a request and wait for the head of the response. Close the result after use.

        Args:
            target: is sent unchanged, behind the path of the URL.
            headers: without headers that frame the body, which are added here.
            fresh: use a new connection.
            wrote: called when the head was written.

        Raises ConnectFault, LocalShortage, LostConnection or BrokenAnswer; ValueError for a header
        with a line break, or a header that is not latin-1.
        """
        headers = {**self.key, **headers}
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header of more than one line")
        framing = f"content-length: {len(body)}\r\n" if body or method == "POST" else ""
        text = (
            f"{method} {self._prefix}{target} HTTP/1.1\r\n{self._own_headers}{lines}{framing}\r\n"
        )
        head = text.encode("latin-1")  # may fail, so before a connection is taken
        connection = (None if fresh else self._take_idle()) or await self._connect()
        response = connection.send(head, body)
        if wrote is not None:
            wrote()
        try:
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    def _take_idle(self) -> Connection | None:
        now = self._loop.time()
        while self._idle:
            connection = self._idle.pop()  # the latest, so that surplus ones grow old and close
            if connection.usable and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(self.connect_s):
                return await self._first_connection()
        except ssl.SSLCertVerificationError as error:
            raise TlsFault(error.verify_message) from error
        except ssl.SSLError as error:
            raise TlsFault(error.reason or "the handshake failed") from error
        except (OSError, TimeoutError) as error:
            if error.errno in _OURS:
                raise LocalShortage(type(error).__name__) from error
            fault = ConnectFault if self._name.known else NameFault
            raise fault(type(error).__name__) from error
        except UnicodeError as error:  # a name that IDNA rejects
            raise NameFault("not a host name") from error

    async def _first_connection(self) -> Connection:
        """Connect to the first address that takes a connection. Raises OSError, UnicodeError."""
        faults: list[OSError] = []
        for address in await self._name.addresses():
            try:
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop, self._keep, self._turns), address, self._port,
                    ssl=self._tls, server_hostname=self._host if self._tls else None,
                )  # fmt: skip
            except ssl.SSLError:
                raise
            except OSError as error:
                faults.append(error)
            else:
                return connection
        # A shortage of this machine counts if it was met at every address: without IPv6, ::1 of
        # localhost fails with "no address", even if 127.0.0.1 answers.
        raise min(faults, key=lambda fault: fault.errno in _OURS)

    def _keep(self, connection: Connection) -> None:
        if self._closed:
            connection.close()
            return
        now = connection.idle_since = self._loop.time()
        while self._idle and now - self._idle[0].idle_since >= IDLE_S:
            self._idle.pop(0).close()
        self._idle.append(connection)

    def close(self) -> None:
        """Close idle connections, and keep none from now on. Running responses go on."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


async def read_all(response: UpstreamResponse, limit: int) -> bytes:
    """Read the whole body. Raises AnswerTooLarge above `limit` bytes."""
    if int(response.headers.get("content-length", 0)) > limit:
        raise AnswerTooLarge(limit)
    pieces, size = [], 0
    while piece := await response.read():
        size += len(piece)
        if size > limit:
            raise AnswerTooLarge(limit)
        pieces.append(piece)
    return b"".join(pieces)
