"""Between the workers of one `forebay proxy --workers N`: datagrams through the parent process.

Each worker has one Unix socket pair to the parent; what one says, the parent hands to the others.
Datagrams keep messages whole, and a full buffer drops one instead of making anybody wait. When the
parent is gone its workers go on alone. A first byte tells books from a worker's greeting.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from forebay.proxy.share.wire import MOST_BYTES

BOOKS, HELLO = b"B", b"H"
AT_ONCE = 64  # datagrams read in one turn of the loop


class HubLink:
    """A worker's end."""

    name = "hub"

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.trouble = ""
        self.dropped = 0

    @property
    def connected(self) -> bool:
        return not self.trouble

    def hello(self, data: bytes) -> None:
        """Tell the parent about ourselves."""
        self._send(HELLO + data)

    def send(self, data: bytes) -> None:
        self._send(BOOKS + data)

    @asynccontextmanager
    async def listen(self, heard: Callable[[bytes], None]) -> AsyncIterator[None]:
        def books(data: bytes) -> None:
            if data[:1] == BOOKS:
                heard(data[1:])

        loop = asyncio.get_running_loop()
        self._end.setblocking(False)

        def readable() -> None:
            if not read_all(self._end, books):
                loop.remove_reader(self._end)
                self.trouble = "the parent process is gone"

        loop.add_reader(self._end, readable)
        try:
            yield
        finally:
            loop.remove_reader(self._end)

    def close(self) -> None:
        self._end.close()

    def _send(self, data: bytes) -> None:
        if self.trouble:
            return
        try:
            self._end.send(data)
        except BlockingIOError:
            self.dropped += 1  # the parent is behind: the next message says it all again
        except OSError as error:
            self.trouble = f"the parent process is gone ({error.strerror})"


class Hub:
    """The parent's ends: relays books, keeps greetings."""

    def __init__(self, greeted: Callable[[int, bytes], None]) -> None:
        self._greeted = greeted
        self._ends: dict[int, socket.socket] = {}
        self.relayed = 0
        self.relayed_bytes = 0
        self.dropped = 0

    def new_end(self, worker: int) -> socket.socket:
        """A fresh pair for a worker about to start; its end, to be closed here once it has it."""
        self.close_end(worker)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        self._ends[worker] = ours
        asyncio.get_running_loop().add_reader(ours, self._readable, worker)
        return theirs

    def close_end(self, worker: int) -> None:
        """The worker is gone."""
        end = self._ends.pop(worker, None)
        if end is not None:
            asyncio.get_running_loop().remove_reader(end)
            end.close()

    def close(self) -> None:
        for worker in list(self._ends):
            self.close_end(worker)

    def _readable(self, worker: int) -> None:
        def take(data: bytes) -> None:
            if data[:1] == HELLO:
                self._greeted(worker, data[1:])
            elif data[:1] == BOOKS:
                self._relay(worker, data)

        if not read_all(self._ends[worker], take):
            self.close_end(worker)

    def _relay(self, worker: int, data: bytes) -> None:
        for other, end in self._ends.items():
            if other != worker:
                try:
                    end.send(data)
                except OSError:  # behind or gone: the next message says it all again
                    self.dropped += 1
                else:
                    self.relayed += 1
                    self.relayed_bytes += len(data)


def read_all(end: socket.socket, take: Callable[[bytes], None]) -> bool:
    """Give on what lies ready, a bounded number; False when the other side is gone."""
    for _ in range(AT_ONCE):
        try:
            data = end.recv(MOST_BYTES + 1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data == b"":
            return False
        take(data)
    return True
