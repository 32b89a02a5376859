"""What makes a proxy one of `--workers N`: its end of the hub, and files of its own."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import orjson
import typer

from forebay.proxy.config.schema import Config
from forebay.proxy.share.hub import HubLink
from forebay.traces.errors import InputError


class WorkerLink(HubLink):
    """The hub link of worker `index`."""

    def __init__(self, index: int, end: socket.socket) -> None:
        super().__init__(end)
        self.index = index

    def listening(self, url: str, admin_url: str) -> None:
        """Tell the parent that we serve, and where it can ask us."""
        self.hello(orjson.dumps({"url": url, "admin_url": admin_url}))


def worker_link(text: str) -> WorkerLink:
    """The link of the worker that `--worker INDEX:FD` says we are."""
    index, _, number = text.partition(":")
    try:
        end = socket.socket(fileno=int(number))
        os.set_inheritable(end.fileno(), False)
        link = WorkerLink(int(index), end)
    except (ValueError, OSError):
        raise InputError("--worker is for --workers to use; give --workers N") from None
    return link


def words_of(context: typer.Context, leave_out: set[str]) -> list[str]:
    """The options a command was given, as words that give them again."""
    words: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in leave_out or value in (None, False):
            continue
        if value is True:
            words.append(parameter.opts[0])
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], str(one)]
    return words


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the workers: ours, less what is for the parent alone.

    What all workers must have alike and one process would choose by dice (a secret that is made
    at the start) belongs into `environ` before the first of them starts.
    """
    return {key: value for key, value in environ.items() if key != "NOTIFY_SOCKET"}


def with_own_files(config: Config, worker: str) -> Config:
    """The same configuration, with a file of its own where two may not write one."""
    index = worker.partition(":")[0]
    changed: dict[str, object] = {}
    if (hlog := config.metrics.hlog) is not None:
        changed["metrics"] = config.metrics.model_copy(update={"hlog": _own(hlog, index)})
    if (trace := config.capture.path) is not None:
        changed["capture"] = config.capture.model_copy(update={"path": _own(trace, index)})
    return config.model_copy(update=changed)


def _own(path: Path, index: str) -> Path:
    return path.with_name(f"{path.stem}.{index}{path.suffix}")
