"""One worker of `--workers N`: its link to the hub, and its own output files."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import orjson
import typer

from forebay.proxy.config.schema import Config
from forebay.proxy.share.hub import HubLink
from forebay.traces.ground.errors import InputError


class WorkerLink(HubLink):
    """The hub link of worker `index`."""

    def __init__(self, index: int, end: socket.socket) -> None:
        super().__init__(end)
        self.index = index

    def listening(self, url: str, admin_url: str) -> None:
        """Greet the parent with our URLs, once we listen."""
        self.hello(orjson.dumps({"url": url, "admin_url": admin_url}))


def worker_link(text: str) -> WorkerLink:
    """Return the link of a worker, from its option `--worker INDEX:FD`."""
    index, _, number = text.partition(":")
    try:
        end = socket.socket(fileno=int(number))
        os.set_inheritable(end.fileno(), False)
        link = WorkerLink(int(index), end)
    except (ValueError, OSError):
        raise InputError("--worker is internal; use --workers N") from None
    return link


def words_of(context: typer.Context, leave_out: set[str]) -> list[str]:
    """Return the options of a command as words of a command line."""
    words: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in leave_out or value in (None, False):
            continue
        if value is True:
            words.append(parameter.opts[0])
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(item)]
    return words


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the workers: ours, without variables for the parent only.

    A random secret that all workers must share has to be in `environ` before any worker starts.
    """
    return {key: value for key, value in environ.items() if key != "NOTIFY_SOCKET"}


def with_own_files(config: Config, worker: str) -> Config:
    """Return the configuration with output files of the worker's own."""
    index = worker.partition(":")[0]
    changed: dict[str, object] = {}
    if (hlog := config.metrics.hlog) is not None:
        changed["metrics"] = config.metrics.model_copy(update={"hlog": _own(hlog, index)})
    if (trace := config.capture.path) is not None:
        changed["capture"] = config.capture.model_copy(update={"path": _own(trace, index)})
    return config.model_copy(update=changed)


def _own(path: Path, index: str) -> Path:
    return path.with_name(f"{path.stem}.{index}{path.suffix}")
