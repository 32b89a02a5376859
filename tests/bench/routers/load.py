"""A client that costs next to nothing: kept-alive connections, requests as ready bytes."""

import asyncio
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import cast

CHAT = "/v1/chat/completions"
WORDS = "the reservoir feeds the turbines evenly while the river rises and falls with rain "
TOKEN = b'"content":'
_serial = count()


class Broken(Exception):
    """The answer is not what it must be."""


def chat(bytes_: int, *, unique: bool = True, stream: tuple[int, int] | None = None) -> bytes:
    """A chat request of about this many bytes, as bytes on the wire.

    Args:
        unique: no two share a beginning.
        stream: tokens, and milliseconds between them.
    """
    name = f"{next(_serial)} " if unique else ""
    text = (name + WORDS * (bytes_ // len(WORDS) + 1))[:bytes_]
    extra = f'"stream":true,"max_tokens":{stream[0]},"seed":{stream[1]},' if stream else ""
    body = f'{{"model":"mock",{extra}"messages":[{{"role":"user","content":"{text}"}}]}}'
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    ).encode()


@dataclass(slots=True)
class Answer:
    """Seconds to the first byte of content and to the end, and the tokens that came."""

    first_s: float
    whole_s: float
    tokens: int = 0
    status: int = 200


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit

    def connection_lost(self, exc: BaseException | None) -> None:
        self._transport = None
        if self._done and not self._done.done():
            self._done.set_exception(Broken("the connection was lost"))

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, timeout_s: float = 60.0) -> Answer:
        if self._transport is None:
            raise Broken("the connection was lost")
        self._done = asyncio.get_running_loop().create_future()
        self._tail, self._needed, self._status, self._tokens = b"", -1, 0, 0
        self._first_at, self._sent_at = 0.0, perf_counter()
        self._transport.write(request)
        return await asyncio.wait_for(self._done, timeout_s)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._status == 0:
            self._tail += data
            end = self._tail.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = self._tail[:end].lower(), self._tail[end + 4 :]
            self._status, self._tail = int(head[9:12]), b""
            if b"content-length:" in head:
                self._needed = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            if not data and self._needed:
                return
        if not self._first_at:
            self._first_at = perf_counter()
        if self._needed >= 0:
            self._needed -= len(data)
            if self._needed <= 0:
                self._finish()
            return
        data = self._tail + data
        self._tokens += data.count(TOKEN)
        self._tail = data[-(len(TOKEN) - 1) :]  # may hold the beginning of the next
        if self._tail.endswith(b"0\r\n\r\n"):
            self._finish()

    def _finish(self) -> None:
        assert self._done is not None
        if not self._done.done():
            now = perf_counter()
            self._done.set_result(
                Answer(
                    self._first_at - self._sent_at, now - self._sent_at, self._tokens, self._status
                )
            )


@dataclass(slots=True)
class Client:
    """Connections to one port, reused."""

    port: int
    _free: list[Connection] = field(default_factory=list)

    async def ask(self, request: bytes, timeout_s: float = 60.0) -> Answer:
        while self._free and not self._free[-1].usable:
            self._free.pop()
        connection = self._free.pop() if self._free else await self._connect()
        try:
            answer = await connection.ask(request, timeout_s)
        except BaseException:
            connection.close()
            raise
        self._free.append(connection)
        if answer.status != 200:
            raise Broken(f"status {answer.status}")
        return answer

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self.port)
        return connection

    def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def in_turn(self, requests: list[bytes]) -> list[Answer]:
        """One after another."""
        return [await self.ask(request) for request in requests]

    async def at_once(self, requests: list[bytes], concurrency: int) -> list[Answer]:
        """`concurrency` at any time."""
        left, answers = iter(requests), []

        async def worker() -> None:
            for request in left:
                answers.append(await self.ask(request))

        for ended in await asyncio.gather(
            *(worker() for _ in range(concurrency)), return_exceptions=True
        ):
            if isinstance(ended, BaseException):
                raise ended
        return answers

    async def paced(self, requests: list[bytes], per_s: float) -> list[Answer]:
        """Open loop: evenly, whatever the answers do; latencies count from the intended time."""
        loop = asyncio.get_running_loop()
        start, tasks = perf_counter() + 0.05, []

        async def one(request: bytes, at: float) -> Answer:
            late_s = perf_counter() - at
            answer = await self.ask(request)
            return Answer(answer.first_s + late_s, answer.whole_s + late_s, answer.tokens)

        for number, request in enumerate(requests):
            at = start + number / per_s
            await asyncio.sleep(max(0.0, at - perf_counter()))
            tasks.append(loop.create_task(one(request, at)))
        return list(await asyncio.gather(*tasks))
