"""`forebay proxy`: read the configuration, serve until told to stop, let what runs run out."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.proxy.command import new_app
from forebay.proxy.config import Config
from forebay.proxy.config_sources import config_yaml, load_config
from forebay.proxy.event_loop import fast_runner

EXAMPLE = """The load-shaping proxy in front of OpenAI-compatible vLLM servers.

Example:

  forebay proxy --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002 --port 8080
"""

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def proxy(
    context: typer.Context,
    backend: Annotated[
        list[str] | None, typer.Option(help="base URL of a vLLM server; once for each")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; flags win over it")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="public port, 0 for any free one")] = None,
    admin_port: Annotated[int | None, typer.Option(help="admin port, 0 for any free one")] = None,
    workers: Annotated[
        int, typer.Option(help="processes that share the port; each is a proxy of its own")
    ] = 1,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="print what is in force, secrets masked")
    ] = False,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="check the configuration and leave")
    ] = False,
) -> None:
    listen = {"host": host, "port": port, "admin_port": admin_port}
    overrides: dict[str, Any] = {
        "listen": {key: value for key, value in listen.items() if value is not None}
    }
    if worker:
        overrides["listen"]["reuse_port"] = True
    if backend:
        overrides["backends"] = [{"url": url} for url in backend]
    loaded = load_config(config, overrides, os.environ)
    if print_config:
        print(config_yaml(loaded), end="")
    elif check_config:
        print("the configuration is valid", file=sys.stderr)
    elif workers != 1:
        raise typer.Exit(_serve_with_workers(loaded, workers, context))
    else:
        with fast_runner() as runner:
            runner.run(serve(loaded, worker))


def _serve_with_workers(config: Config, count: int, context: typer.Context) -> int:
    from forebay.proxy.share.worker import words_of
    from forebay.proxy.share.workers import serve_with_workers

    words = words_of(context, leave_out={"workers", "host", "port", "admin_port"})
    with fast_runner() as runner:
        return runner.run(serve_with_workers(config, count, words, _say))


async def serve(config: Config, worker: str | None = None) -> None:
    """Serve until SIGTERM, SIGINT or POST /drain, then up to `timeouts.drain` longer.

    Args:
        worker: which of `--workers` we are, and our end of the hub.
    """
    from forebay.proxy.serve import start_proxy

    link = None
    if worker:
        from forebay.proxy.share.worker import as_worker

        config, link = as_worker(config, worker)
    async with start_proxy(config, _say, [link] if link else []) as running:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            with suppress(NotImplementedError):  # Windows
                loop.add_signal_handler(signal_number, running.stop.set)
        if link:
            link.listening(running.url, running.admin_url)
            _say(f"worker {link.index} listens, its admin port is {running.admin_url}")
        else:
            _say(f"listening on {running.url}, admin on {running.admin_url}")
        await running.stop.wait()
        _say(f"draining: {running.app.active} requests, up to {config.timeouts.drain:g} s")
        if not await running.drained(config.timeouts.drain):
            _say(f"gave up on {running.app.active} requests")


def _say(line: str) -> None:
    print(f"forebay proxy: {line}", flush=True)
