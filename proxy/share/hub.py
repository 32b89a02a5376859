"""The link between the workers of `forebay proxy --workers N`: datagrams through the parent.

Each worker has a Unix socket pair to the parent, which relays each message to the other workers.
Datagrams keep messages whole, and a full buffer drops a message instead of blocking. If the parent
ends, its workers drain and end, as no process could reload, restart or measure them. The first byte
of a datagram marks a report (REPORT), a greeting (HELLO) or a heartbeat (BEAT), which shows the
parent that a worker's event loop runs.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from forebay.proxy.share.wire import MOST_BYTES
from forebay.traces.ground.event_loop import background

REPORT, HELLO, BEAT = b"B", b"H", b"L"
BEAT_S = 1.0  # apart from reports, whose own faults must not look like a worker that hangs
AT_ONCE = 64  # datagrams read in one turn of the event loop


class HubLink:
    """The end of a worker."""

    name = "hub"

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.trouble = ""
        self.dropped = 0
        self.gone: Callable[[], None] = lambda: None  # called once, when the parent has ended

    @property
    def connected(self) -> bool:
        return not self.trouble

    def hello(self, data: bytes) -> None:
        """Send a greeting to the parent."""
        self._send(HELLO + data)

    def send(self, data: bytes) -> None:
        self._send(REPORT + data)

    @asynccontextmanager
    async def listen(self, heard: Callable[[bytes], None]) -> AsyncIterator[None]:
        def take(data: bytes) -> None:
            if data[:1] == REPORT:
                heard(data[1:])

        loop = asyncio.get_running_loop()
        self._end.setblocking(False)

        def readable() -> None:
            if not read_all(self._end, take):
                loop.remove_reader(self._end)
                self._ended("")

        async def beat() -> None:
            while True:
                self._send(BEAT)
                await asyncio.sleep(BEAT_S)

        loop.add_reader(self._end, readable)
        try:
            async with background(beat()):
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
            self.dropped += 1  # the parent is slow; the next message holds the whole state again
        except OSError as error:
            self._ended(f" ({error.strerror})")

    def _ended(self, why: str) -> None:
        if not self.trouble:
            self.trouble = f"the parent process has ended{why}"
            self.gone()


class Hub:
    """The ends of the parent: relays state, and passes greetings to `greeted`.

    Args:
        heard: called with the index of a worker for everything it sends.
    """

    def __init__(
        self,
        greeted: Callable[[int, bytes], None],
        heard: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._greeted = greeted
        self._heard = heard
        self._ends: dict[int, socket.socket] = {}
        self.relayed = 0
        self.relayed_bytes = 0
        self.dropped = 0

    def new_end(self, worker: int) -> socket.socket:
        """Make a socket pair for a new worker. Returns its end, to close once it has started."""
        self.close_end(worker)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.setblocking(False)
        self._ends[worker] = ours
        asyncio.get_running_loop().add_reader(ours, self._readable, worker)
        return theirs

    def close_end(self, worker: int) -> None:
        """Close the end of a worker that has ended."""
        end = self._ends.pop(worker, None)
        if end is not None:
            asyncio.get_running_loop().remove_reader(end)
            end.close()

    def close(self) -> None:
        for worker in list(self._ends):
            self.close_end(worker)

    def _readable(self, worker: int) -> None:
        def take(data: bytes) -> None:
            self._heard(worker)
            if data[:1] == HELLO:
                self._greeted(worker, data[1:])
            elif data[:1] == REPORT:
                self._relay(worker, data)

        if not read_all(self._ends[worker], take):
            self.close_end(worker)

    def _relay(self, worker: int, data: bytes) -> None:
        for other, end in self._ends.items():
            if other != worker:
                try:
                    end.send(data)
                except OSError:  # slow or ended; the next message holds the whole state again
                    self.dropped += 1
                else:
                    self.relayed += 1
                    self.relayed_bytes += len(data)


def read_all(end: socket.socket, take: Callable[[bytes], None]) -> bool:
    """Pass ready datagrams to `take`, a bounded number. False if the other side has closed."""
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
