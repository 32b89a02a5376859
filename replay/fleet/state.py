"""The folder of a fleet: its lock, its state, and the identity of its processes.

    lock        locked (flock) by `fleet up` as long as it lives
    state.json  the started servers, removed after a clean end
    proxy.yaml  the proxy's configuration for this fleet
    NAME.log    output of a server. NAME.events and NAME.replay are its sockets

Only the owner can read the folder (0700), because KV events carry the tokens of prompts.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from forebay.traces.errors import InputError

FORMAT = 2
STATE = "state.json"
PROXY = "proxy.yaml"


@dataclass(frozen=True, slots=True)
class Process:
    """A process, identified by its number and its start time, because numbers are reused.

    An empty start time: the process ended before it could be read.
    """

    pid: int
    began: str

    @property
    def alive(self) -> bool:
        return bool(self.began) and start_time(self.pid) == self.began


@dataclass(slots=True)
class ServerState:
    """One server."""

    name: str
    url: str
    log: str
    gpu: int | None = None
    process: Process | None = None


@dataclass(slots=True)
class FleetState:
    """The content of the state file."""

    supervisor: Process
    model: str
    vllm: str
    proxy_config: str
    stop_s: float
    servers: list[ServerState] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def start_time(pid: int) -> str:
    """Return when the process started, unique among processes with its number. Empty: it ended.

    The text comes from /proc: the boot's id, and clock ticks since the boot (field 22 of stat,
    proc(5)).
    """
    return _start_and_session(pid)[0]


def left_of(leader: Process) -> list[Process]:
    """Return the remaining processes of the session of `leader`, which has ended.

    An API server that dies leaves its engine running. The result is empty if the leader's number
    belongs to another process: the kernel does not reuse a number that a session still has.
    """
    boot, _, tick = leader.began.partition(":")
    if not boot or start_time(leader.pid):
        return []
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            started, session = _start_and_session(int(entry.name))
            boot_then, _, tick_then = started.partition(":")
            if session == leader.pid and boot_then == boot and int(tick_then) >= int(tick):
                left.append(Process(int(entry.name), started))
    return left


def _start_and_session(pid: int) -> tuple[str, int]:
    """Return start time and session (field 6) of a process, empty and 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may be any bytes
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "", 0
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return ("", 0) if fields[0] in "ZX" else (f"{boot}:{fields[19]}", int(fields[3]))


def this_process() -> Process:
    """Return this process (InputError: no /proc to identify processes)."""
    if not (started := start_time(os.getpid())):
        raise InputError("forebay fleet needs Linux's /proc to identify its own processes")
    return Process(os.getpid(), started)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a fleet (InputError: another supervisor has locked it)."""
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
                f"--dir {folder}: a fleet is up there: stop it with `forebay fleet down --dir "
                f"{folder}`, or give another folder"
            ) from None
        yield
    finally:
        os.close(lock)


def write_state(folder: Path, state: FleetState) -> None:
    _replace(folder / STATE, orjson.dumps(state.as_json(), option=orjson.OPT_INDENT_2) + b"\n")


def write_proxy_file(folder: Path, text: str) -> Path:
    """Write the proxy's configuration, and return its path (InputError: it cannot be written)."""
    try:
        _replace(folder / PROXY, text.encode())
    except OSError as error:
        raise InputError(f"--dir {folder}: {PROXY}: {error.strerror}") from error
    return folder / PROXY


def _replace(file: Path, content: bytes) -> None:
    """Replace a file atomically: a reader, such as a running proxy, sees the old or the new one."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(content)
    new.replace(file)


def remove_state(folder: Path) -> None:
    (folder / STATE).unlink(missing_ok=True)


def read_state(folder: Path) -> FleetState | None:
    """Read the state file, None if it is missing (InputError: a wrong folder or file)."""
    if not folder.is_dir():
        raise InputError(f"--dir {folder}: no such folder; `forebay fleet up` makes it")
    file = folder / STATE
    try:
        data = orjson.loads(file.read_bytes())
        if data.pop("format") != FORMAT:
            raise InputError(f"{file}: written by another version of forebay; use that to stop it")
        servers = [
            ServerState(**{**server, "process": _process(server["process"])})
            for server in data.pop("servers")
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
