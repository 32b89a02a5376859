"""The folder of a fleet: who holds it, what runs, and whether a process is still the one meant.

    lock        held (flock) by the supervisor for as long as it lives
    state.json  what runs; replaced at every change, gone after a clean end
    proxy.yaml  the configuration that fits
    NAME.log    what a server says; NAME.events, NAME.replay: its sockets

The folder is the owner's only (0700): KV events carry the tokens of prompts.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from forebay.traces.errors import InputError

FORMAT = 1
STATE = "state.json"
PROXY = "proxy.yaml"
Phase = Literal["starting", "up", "waiting", "failed", "stopping", "stopped"]


@dataclass(frozen=True, slots=True)
class Process:
    """A process and when it began, since numbers are used again; empty: it was gone before that
    could be read, and nothing is known to be it."""

    pid: int
    began: str

    @property
    def alive(self) -> bool:
        return bool(self.began) and began(self.pid) == self.began


@dataclass(slots=True)
class ServerState:
    """One server. `since`: seconds of the epoch of its last change of phase."""

    name: str
    url: str
    log: str
    gpu: int | None = None
    phase: Phase = "waiting"
    since: float = 0.0
    process: Process | None = None
    restarts: int = 0
    last_end: str = ""


@dataclass(slots=True)
class FleetState:
    """The whole file."""

    supervisor: Process
    model: str
    vllm: str
    proxy_config: str
    stop_s: float
    servers: list[ServerState] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def began(pid: int) -> str:
    """When the process began, as a text that no other with its number has; empty: it is gone.

    From /proc: the boot, and clock ticks since it (field 22 of stat, proc(5)).
    """
    return _look(pid)[0]


def left_of(leader: Process) -> list[Process]:
    """What is left of the session of `leader`, which is gone: an API server that dies leaves its
    engine. Nothing where its number is somebody else's by now, since the kernel gives no number
    away that a session still has."""
    boot, _, tick = leader.began.partition(":")
    if not boot or began(leader.pid):
        return []
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            begun, session = _look(int(entry.name))
            boot_then, _, tick_then = begun.partition(":")
            if session == leader.pid and boot_then == boot and int(tick_then) >= int(tick):
                left.append(Process(int(entry.name), begun))
    return left


def _look(pid: int) -> tuple[str, int]:
    """When it began and its session (field 6); empty and 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may be any bytes
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "", 0
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return ("", 0) if fields[0] in "ZX" else (f"{boot}:{fields[19]}", int(fields[3]))


def this_process() -> Process:
    """Raises InputError where there is no /proc to tell one process from another."""
    if not (mine := began(os.getpid())):
        raise InputError("forebay fleet needs Linux's /proc to tell its own processes")
    return Process(os.getpid(), mine)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder of a fleet; raises InputError when another supervisor does."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InputError(f"--dir {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"--dir {folder}: a fleet is up there: `forebay fleet down --dir {folder}`, or "
                "give another folder"
            ) from None
        yield
    finally:
        os.close(lock)


def write_state(folder: Path, state: FleetState) -> None:
    """Replace the file at once: a reader sees the old one or the new one."""
    new = folder / f"{STATE}.new"
    new.write_bytes(orjson.dumps(state.as_json(), option=orjson.OPT_INDENT_2) + b"\n")
    new.replace(folder / STATE)


def remove_state(folder: Path) -> None:
    (folder / STATE).unlink(missing_ok=True)


def read_state(folder: Path) -> FleetState | None:
    """What runs there, None when nothing does; raises InputError for what is no fleet's folder."""
    if not folder.is_dir():
        raise InputError(f"--dir {folder}: no such folder; `forebay fleet up` makes it")
    file = folder / STATE
    try:
        data = orjson.loads(file.read_bytes())
        if data.pop("format") != FORMAT:
            raise InputError(f"{file}: written by another version of forebay; stop it with that")
        servers = [
            ServerState(**{**one, "process": _process(one["process"])})
            for one in data.pop("servers")
        ]
        supervisor = Process(**data.pop("supervisor"))
        return FleetState(supervisor=supervisor, servers=servers, **data)
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{file}: not the state of a fleet ({error}); end its servers by hand and remove it"
        ) from error


def _process(data: dict[str, Any] | None) -> Process | None:
    return Process(**data) if data else None
