"""The link between proxies on several machines: publish and subscribe on Redis or Valkey.

Nothing is stored there: a message without a receiver is lost, and the next message, 0.1 s later,
has the whole state again. Every wait is bounded, and a server that fails is retried, ever more
slowly. A proxy receives its own messages, so silence means that the subscription is dead.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit, urlunsplit

from forebay.traces.ground.errors import InputError
from forebay.traces.ground.event_loop import background

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import PubSub

WAIT_S = 1.0  # bound of one operation of the server
MOST_BYTES = 4 << 20  # largest message: the state of a large proxy has some 100 kB
SILENT_S = 2.0  # without any message, even our own: the subscription is dead
RETRY_S, RETRY_MOST_S = 0.1, 5.0


class RedisLink:
    """A connection to one server, which is renewed while `listen` runs."""

    name = "redis"

    def __init__(self, url: str) -> None:
        try:
            import redis.asyncio  # noqa: F401
        except ImportError:
            raise InputError(
                "share: the package redis is not installed; pip install 'forebay[redis]'"
            ) from None
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        prefix = query.pop("prefix", ["forebay"])[0]
        rest = "&".join(f"{key}={value}" for key, values in query.items() for value in values)
        self._url = urlunsplit(parts._replace(query=rest))
        # The databases of a server share their channels, so the number is in the name.
        self._channel = f"{prefix}:{parts.path.strip('/') or '0'}:books"
        self._latest: bytes | None = None
        self._ready = asyncio.Event()
        self.trouble = "not connected yet"

    @property
    def connected(self) -> bool:
        return not self.trouble

    def send(self, data: bytes) -> None:
        self._latest = data  # replaces an older one, which holds no more
        self._ready.set()

    def listen(self, heard: Callable[[bytes], None]) -> AbstractAsyncContextManager[None]:
        return background(self._connect_forever(heard))

    async def _connect_forever(self, heard: Callable[[bytes], None]) -> None:
        """Connect, and reconnect with growing delays."""
        from redis.exceptions import RedisError

        wait_s = RETRY_S
        while True:
            least_s = 0.0
            try:
                await self._session(heard)
            # TypeError, ValueError: the URL has an option that the client does not know.
            except* (RedisError, OSError, TimeoutError, TypeError, ValueError) as group:
                trouble = _class_name(group)
            except* Exception as group:
                # Our own fault, or the client's: without this the link would stay "connected" with
                # no task. It is logged each time, so the delay is the longest.
                trouble, least_s = f"internal error: {_class_name(group)}", RETRY_MOST_S
            again_s = RETRY_S if self.connected else min(RETRY_MOST_S, 2 * wait_s)
            wait_s = max(least_s, again_s)
            self.trouble = trouble
            await asyncio.sleep(wait_s)

    async def _session(self, heard: Callable[[bytes], None]) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        # A silent server ends the session within seconds. Another one is tried later.
        client = Redis.from_url(
            self._url,
            socket_timeout=SILENT_S + WAIT_S,
            socket_connect_timeout=WAIT_S,
            retry=Retry(NoBackoff(), 0),
            max_connections=4,
            protocol=2,
            parser_class=bounded_parser(),
        )
        # The link is up once it has subscribed. Any fault ends the session.
        pubsub = client.pubsub()
        try:
            async with asyncio.timeout(2 * WAIT_S):
                await pubsub.subscribe(self._channel)
                await client.ping()
            self.trouble = ""
            async with asyncio.TaskGroup() as group:
                group.create_task(self._publish(client))
                group.create_task(self._hear(pubsub, heard))
        finally:
            with suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
                    await client.aclose()

    async def _publish(self, client: "Redis") -> None:
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._latest is not None:
                data, self._latest = self._latest, None
                async with asyncio.timeout(WAIT_S):
                    await client.publish(self._channel, data)

    async def _hear(self, pubsub: "PubSub", heard: Callable[[bytes], None]) -> None:
        while True:
            async with asyncio.timeout(SILENT_S):
                message = None
                while message is None:
                    message = await pubsub.get_message(
                        ignore_subscribe_messages=True, timeout=SILENT_S
                    )
            heard(message["data"])


def bounded_parser() -> type:
    """Return a parser that ends the connection at a message that is too large to be a proxy's."""
    from redis._parsers import _AsyncRESP2Parser
    from redis.exceptions import InvalidResponse

    class BoundedParser(_AsyncRESP2Parser):
        async def _read(self, length: int) -> bytes:
            if length > MOST_BYTES:
                raise InvalidResponse(f"a message of {length} bytes")
            return await super()._read(length)

    return BoundedParser


def _class_name(error: BaseException) -> str:
    """Return the class of an error, or of the first in a group: its text may hold data."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return type(error).__name__
