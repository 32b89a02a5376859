"""Run `forebay proxy --workers N`: start the workers, and serve their common admin port."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress

from forebay.proxy.config.advice import advise
from forebay.proxy.config.schema import Config
from forebay.proxy.http1.server.listen import listen, listen_fault, url_host
from forebay.proxy.http1.server.server import HttpServer
from forebay.proxy.log_events import LogEvent, Say
from forebay.proxy.runtime import systemd
from forebay.proxy.security.guards import key_holders
from forebay.proxy.workers.workers import WorkerPool
from forebay.proxy.workers.workers_admin import WorkersAdmin
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.event_loop import STOP_SIGNALS, on_signal


async def serve_with_workers(
    config: Config,
    count: int,
    words: Sequence[str],
    say: Say,
    load: Callable[[], Config],
) -> int:
    """Run `forebay proxy` with `words` in `count` processes on one port. Returns the exit status.

    Raises InputError if a port cannot be listened on.

    Args:
        load: reads the configuration again, as workers may have reloaded it.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise InputError("--workers: this system cannot share a port between processes")
    host, admin_host = config.listen.host, config.listen.effective_admin_host
    async with AsyncExitStack() as stack:
        # Bound and never listened on: it reserves the port, and fails now if the port is taken.
        holder = stack.enter_context(_hold(host, config.listen.port))
        port, holders = holder.getsockname()[1], key_holders(config, os.environ)
        # fmt: off
        workers = WorkerPool(
            [
                sys.executable, "-m", "forebay.proxy", "proxy", *words,
                "--host", host, "--port", str(port), "--admin-port", "0",
            ],
            count,
            say,
        )
        # fmt: on
        admin = await stack.enter_async_context(WorkersAdmin(workers))
        try:
            runner, admin_port = await listen(
                HttpServer(admin.handle),
                admin_host,
                config.listen.admin_port,
                reuse_port=config.listen.reuse_port,
            )
        except OSError as error:
            raise listen_fault("admin_port", admin_host, config.listen.admin_port, error) from error
        stack.push_async_callback(runner.cleanup)
        for name in STOP_SIGNALS:
            on_signal(name, workers.stop.set)
        on_signal("SIGHUP", workers.reload)

        def listening() -> None:
            where = (
                f"listening on http://{url_host(host)}:{port}, "
                f"admin on http://{url_host(admin_host)}:{admin_port}, "
                f"{count} workers"
            )
            say(LogEvent.LISTENING, where)
            advise(config, say, holders)
            systemd.ready(where)

        return await workers.run(listening, lambda: patience_s(config, load))


def patience_s(config: Config, load: Callable[[], Config]) -> float:
    """Return the seconds a worker may take to end, with its first or reloaded configuration."""
    sections = [config.timeouts]
    with suppress(InputError):  # no worker has taken this configuration either
        sections.append(load().timeouts)
    return max(timeouts.lame_duck + timeouts.drain for timeouts in sections)


def _hold(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        holder = socket.socket(family, kind, protocol)
        try:
            # Connections of the process before us stay in TIME_WAIT for a minute. A socket that
            # listens is still an error.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(address)
        except OSError:
            holder.close()
            raise
    except OSError as error:
        raise listen_fault("port", host, port, error) from error
    return holder
