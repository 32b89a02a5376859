"""Write log lines from a thread: a standard output without a reader must not stop the proxy."""

import logging
import os
import queue
import threading
import time
from contextlib import suppress
from typing import Final

MOST_LINES: Final = 10_000  # longest queue of lines; a line has some hundred bytes
CLOSE_S: Final = 1.0  # time to write waiting lines when the process ends
FULL_S: Final = 0.05  # time between two tries of a stream that does not block
_END: Final = b""


class QueuedLines(logging.Handler):
    """Puts lines into a bounded queue. A thread writes them to a descriptor.

    Lines that do not fit or cannot be written are dropped: a reader that has gone, or a full disk,
    ends nothing.

    Attributes:
        dropped: lines that were not written.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes] = queue.Queue(MOST_LINES)
        # A daemon: at the end of the process it may still wait for a reader.
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or count it as dropped."""
        try:
            self._lines.put_nowait((self.format(record) + "\n").encode(errors="replace"))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write the waiting lines, for a moment at most."""
        with suppress(queue.Full):
            self._lines.put_nowait(_END)
            self._thread.join(CLOSE_S)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) != _END:
            try:
                self._write(line)
            except OSError:
                self.dropped += 1

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._descriptor, line) :]
            except BlockingIOError:
                time.sleep(FULL_S)


def dropped_lines(logger: logging.Logger) -> int:
    """Return the log lines of a logger that were dropped."""
    return sum(h.dropped for h in logger.handlers if isinstance(h, QueuedLines))
