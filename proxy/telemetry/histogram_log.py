"""The histogram log: write times to first token to a file while the proxy runs."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from forebay.proxy.log_events import LogEvent, Say
from forebay.proxy.telemetry.logs.usage_ledger import open_at_once, why_not
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.event_loop import background
from forebay.traces.ground.hlog import HlogWriter, IntervalLog

HLOG_INTERVAL_S = 1.0
# More than the lines of one interval. Lines that a full disk does not take wait in this buffer, and
# beyond it whole lines are left out: a torn line would make the file unreadable.
HLOG_BUFFER_BYTES = 1 << 20


@asynccontextmanager
async def histogram_log(path: Path | None, metrics: ProxyMetrics, say: Say) -> AsyncIterator[None]:
    """Write the TTFT of each bucket to the .hlog file `path` once a second, unless it is None.

    A full disk loses intervals and never stops the proxy. It is logged once until it has room.
    """
    if path is None:
        yield
        return
    # A file that cannot be opened is a fault of the configuration.
    try:
        file = open_at_once(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        stream = os.fdopen(file, "w", HLOG_BUFFER_BYTES, encoding="utf-8")
    except OSError as error:
        raise InputError(f"metrics.hlog: cannot write {path} ({why_not(error)})") from error
    # Later faults are logged once, until a write succeeds.
    clock = asyncio.get_running_loop().time
    start = clock()
    failing = False

    def attempt(step: Callable[[], None]) -> None:
        nonlocal failing
        try:
            step()
        except OSError as error:
            if not failing:
                line = f"metrics.hlog: {path} cannot be written ({error.strerror}); trying again"
                say(LogEvent.HLOG_FAILED, line)
            failing = True
        else:
            failing = False

    def flush() -> None:
        log.flush(clock() - start)
        stream.flush()

    def close() -> None:
        with stream:
            log.close(clock() - start)

    async def flush_each_interval() -> None:
        while True:
            await asyncio.sleep(HLOG_INTERVAL_S)
            attempt(flush)

    log = metrics.log = IntervalLog(HlogWriter(stream, time.time(), ["forebay proxy: TTFT"]))
    try:
        async with background(flush_each_interval()):
            yield
    finally:
        attempt(close)
