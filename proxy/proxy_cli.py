"""`forebay proxy`: read the configuration, serve until a signal, and drain."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import config_json, config_yaml, load_config
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.event_loop import STOP_SIGNALS, last_runner, on_signal, short_collections

if TYPE_CHECKING:
    from forebay.proxy.log_events import Say

EXAMPLE = """The load-shaping proxy in front of OpenAI-compatible vLLM servers.

Example:

  forebay proxy --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002 --port 8080
"""

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def proxy(
    context: typer.Context,
    backend: Annotated[
        list[str] | None, typer.Option(help="base URL of a vLLM server; repeat for each")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; options override it")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="public port; 0: any free one")] = None,
    admin_port: Annotated[int | None, typer.Option(help="admin port; 0: any free one")] = None,
    workers: Annotated[
        int,
        typer.Option(min=1, max=256, help="processes that share the port; each is a whole proxy"),
    ] = 1,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="print the effective configuration without secrets"),
    ] = False,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="check the configuration and exit")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the configuration, or log lines, as JSON")
    ] = False,
) -> None:
    # Read the configuration, in which options of the command line override the file.
    listen = {"host": host, "port": port, "admin_port": admin_port}
    overrides: dict[str, Any] = {
        "listen": {key: value for key, value in listen.items() if value is not None}
    }
    if as_json:
        overrides["logs"] = {"format": "json"}
    if backend:
        overrides["backends"] = [{"url": url} for url in backend]
    loaded = load_config(config, overrides, os.environ, to_serve=check_config or not print_config)
    # Check it, print it, or serve it.
    if check_config:
        _check(loaded)
    if print_config:
        print(config_json(loaded) if as_json else config_yaml(loaded), end="")
    elif check_config:
        if as_json:
            print('{"valid": true}')
        talk("the configuration is valid")
    elif workers != 1:
        load = partial(_load, config, overrides, None)
        raise typer.Exit(_serve_with_workers(loaded, load, workers, context))
    else:
        with last_runner() as runner:
            load = partial(_load, config, overrides, worker)
            runner.run(serve(load(), load, config, worker))


def _check(config: Config) -> None:
    """Check the files and modules that the configuration needs. Raises InputError."""
    from forebay.proxy.diagnose.config_file import check_files

    for warning in check_files(config, os.environ):
        talk(f"warning: {warning}")
    if any(backend.kv_events for backend in config.backends):
        from forebay.proxy.kv_events.follower import kv_event_modules

        kv_event_modules()


def _load(path: Path | None, overrides: dict[str, Any], worker: str | None) -> Config:
    config = load_config(path, overrides, os.environ)
    if worker is None:
        return config
    from forebay.proxy.workers.worker import with_own_files

    return with_own_files(config, worker)


def _serve_with_workers(
    config: Config, load: Callable[[], Config], count: int, context: typer.Context
) -> int:
    from forebay.proxy.api.cache_salt import share_cache_secret
    from forebay.proxy.telemetry.logs.access_log import configure_logs, say
    from forebay.proxy.workers.serve_workers import serve_with_workers
    from forebay.proxy.workers.worker import words_of

    configure_logs(config.logs)
    share_cache_secret(os.environ)  # workers must salt the prompts of a tenant alike
    words = words_of(context, leave_out={"workers", "host", "port", "admin_port"})
    with last_runner() as runner:
        return runner.run(serve_with_workers(config, count, words, say, load))


async def serve(
    config: Config, load: Callable[[], Config], watch: Path | None, worker: str | None = None
) -> None:
    """Serve until SIGTERM, SIGINT or POST /drain, then drain for up to `timeouts.drain`.

    SIGHUP, and a change of the file `watch`, apply the configuration that `load` returns.

    Args:
        worker: the `--worker` option of a process of `--workers`.
    """
    from forebay.proxy.config.advice import advise
    from forebay.proxy.log_events import LogEvent
    from forebay.proxy.runtime import systemd
    from forebay.proxy.runtime.memory import keep_large_apart
    from forebay.proxy.serve import start_proxy
    from forebay.proxy.telemetry.logs.access_log import configure_logs, say

    # A worker reports to its parent, through a link that is also its link to the other workers.
    configure_logs(config.logs)
    keep_large_apart()
    link = None
    if worker:
        from forebay.proxy.workers.worker import worker_link

        link = worker_link(worker)
    links = [link] if link else []
    async with start_proxy(
        config, say, load=load, watch=watch, links=links, share_port=link is not None
    ) as running:
        # Serve until a signal or POST /drain.
        for name in STOP_SIGNALS:
            on_signal(name, running.stop.set)
        on_signal("SIGHUP", running.reloader.request)
        where = f"listening on {running.url}, admin on {running.admin_url}"
        if config.mode == "observe":
            where += "; observing: each request is sent at once"
        if link:
            link.gone = partial(_end_alone, running.stop.set, say)
            link.listening(running.url, running.admin_url)
            where = f"worker {link.index} listens, its admin port is {running.admin_url}"
        say(LogEvent.LISTENING, where)
        if not worker:
            advise(config, say, running.security.auth.tenants())
        systemd.ready(where)
        with short_collections():
            await running.stop.wait()
        # Drain, with the latest timeouts.
        timeouts = running.reloader.config.timeouts
        more = f" after {timeouts.lame_duck:g} s of lame duck" if timeouts.lame_duck else ""
        draining = f"draining: {running.app.active} requests, up to {timeouts.drain:g} s{more}"
        say(LogEvent.DRAINING, draining)
        systemd.stopping(draining)
        await running.lame_duck()
        if left := await running.drain(timeouts.drain):
            say(LogEvent.REQUESTS_CUT, f"ended {left} requests that took too long")


def _end_alone(stop: Callable[[], None], say: "Say") -> None:
    """End a worker whose parent has ended: it cannot be reloaded any more, and holds the port."""
    from forebay.proxy.log_events import LogEvent

    say(LogEvent.PARENT_ENDED, "the parent of --workers has ended: this worker ends, too")
    stop()
