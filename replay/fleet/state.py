"""The folder of a fleet: its state, and the identity of its processes.

    state.json  the started servers, there until `fleet down` has stopped them
    proxy.yaml  the proxy's configuration for this fleet
    NAME.log    output of a server. NAME.events and NAME.replay are its sockets

Only the owner can read the folder (0700), because KV events carry the tokens of prompts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import orjson
from pydantic import TypeAdapter, ValidationError

from forebay.traces.ground.errors import InputError

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

    @property
    def number_is_reused(self) -> bool:
        """Return True if another process has the number by now, or the machine was restarted."""
        boot = self.began.partition(":")[0]
        return boot != _boot_id() or start_time(self.pid) not in ("", self.began)


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server. `process` leads a process group, to which its engine belongs."""

    name: str
    url: str
    log: str
    gpu: int | None
    process: Process


@dataclass(slots=True)
class FleetState:
    """The content of the state file. `stop_s`: seconds that a server has to end after SIGTERM."""

    model: str
    vllm: str
    proxy_config: str
    stop_s: float
    servers: list[ServerState] = field(default_factory=list)
    format: Literal[3] = 3


def start_time(pid: int) -> str:
    """Return when the process started, unique among processes with its number. Empty: it ended.

    The text comes from /proc: the boot's id, and clock ticks since the boot (field 22 of stat,
    proc(5)).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may be any bytes
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return "" if fields[0] in "ZX" else f"{_boot_id()}:{fields[19]}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise InputError("forebay fleet needs Linux's /proc to identify its processes") from error


def make_folder(folder: Path) -> None:
    """Make the folder of a fleet, for its owner alone (InputError: it cannot be made)."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--dir {folder}: {error.strerror}") from error


def create_state(folder: Path, state: FleetState) -> None:
    """Write the first state of a fleet (InputError: another fleet is up there)."""
    make_folder(folder)
    try:
        (folder / STATE).touch(exist_ok=False)  # of two commands at once, one wins
    except FileExistsError:
        raise InputError(
            f"--dir {folder}: a fleet is up there: stop it with `forebay fleet down --dir "
            f"{folder}`, or give another folder"
        ) from None
    except OSError as error:
        raise InputError(f"--dir {folder}: {error.strerror}") from error
    write_state(folder, state)


def write_state(folder: Path, state: FleetState) -> None:
    write_file(folder / STATE, orjson.dumps(state, option=orjson.OPT_INDENT_2).decode() + "\n")


def write_file(file: Path, text: str) -> Path:
    """Write a file of the fleet, and return its path (InputError: it cannot be written).

    The file is replaced atomically: a reader, such as a running proxy, sees the old or the new one.
    """
    new = file.with_name(f"{file.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; give another --dir") from error
    return file


def remove_state(folder: Path) -> None:
    """Remove the state file, and the sockets that killed servers have left."""
    for file in (folder / STATE, *folder.glob("*.events"), *folder.glob("*.replay")):
        file.unlink(missing_ok=True)


def read_state(folder: Path) -> FleetState | None:
    """Read the state file, None if it is missing (InputError: a wrong folder or file)."""
    if not folder.is_dir():
        raise InputError(f"--dir {folder}: no such folder; `forebay fleet up` makes it")
    file = folder / STATE
    try:
        return TypeAdapter(FleetState).validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise InputError(
            f"{file}: not the state of a fleet of this forebay ({error.errors()[0]['msg']}); stop "
            "it with the forebay that wrote it, or end its servers by hand and remove the file"
        ) from error
