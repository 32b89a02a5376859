"""Find vLLM's command and version without importing it, which takes 10 s."""

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.proxy.vllm_scheduler.settings import NEWEST as NEWEST_OF_CLASS
from forebay.proxy.vllm_scheduler.settings import OLDEST as OLDEST_OF_CLASS
from forebay.replay.fleet.gpu.flags import CLASS_FLAG, names_in, value_in
from forebay.traces.errors import InputError

OLDEST = (0, 11)
"""The first version whose flags were checked. Older versions may lack any of them."""
NEWEST = (0, 32)
ASK_S = 120.0
_HOW = (
    "install vLLM (https://docs.vllm.ai), e.g. `uv pip install vllm` in an environment of its "
    "own, and give --vllm PATH/bin/vllm; `make vllm-cpu` builds one for the CPU"
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_ASK = "import importlib.metadata as m; print(m.version('vllm'))"
_ASK_CLASS = "import forebay.proxy.vllm_scheduler"


@dataclass(frozen=True, slots=True)
class VllmInstall:
    """The vllm command, and its version as vLLM writes it (`0.32.0+cpu`).

    Attributes:
        flags: names that `vllm serve --help` lists. None where it was not asked or did not answer.
        has_class: True if Forebay's scheduler class can be imported by this vLLM.
    """

    command: str
    version: str
    flags: frozenset[str] | None = None
    has_class: bool = False

    @property
    def release(self) -> tuple[int, int]:
        """Return the major and minor version."""
        return release_of(self.version)

    def runs_class(self, vllm_args: Sequence[str]) -> bool:
        """Return True if a server with these further flags has Forebay's scheduler class."""
        text = value_in(vllm_args, CLASS_FLAG)
        if text is not None:
            return text.startswith("forebay.")
        return self.has_class and (self.flags is None or CLASS_FLAG in self.flags)


def release_of(version: str) -> tuple[int, int]:
    """Read the major and minor version of `0.32.0+cpu` (InputError: another form)."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if not match:
        raise InputError(f"--vllm-version {version}: give one such as 0.32")
    return int(match[1]), int(match[2])


def find_vllm(name: str | None) -> VllmInstall:
    """Find the command `name`, else this environment's, else PATH's (InputError: no vllm)."""
    beside = Path(sys.executable).with_name("vllm")
    command = shutil.which(name or (str(beside) if beside.is_file() else "vllm"))
    if command is None:
        if name:
            raise InputError(f"--vllm {name}: no such command; {_HOW}")
        raise InputError(f"vllm is not installed here: {_HOW}")
    command = str(Path(command).absolute())
    version = _by_metadata(command) or _by_asking(command)
    if release_of(version) < OLDEST:
        raise InputError(
            f"{command} is vLLM {version}; {OLDEST[0]}.{OLDEST[1]} or later is needed: "
            "pip install -U vllm"
        )
    return VllmInstall(command, version, has_class=_has_class(command, version))


def listed_flags(command: str) -> frozenset[str] | None:
    """Return the flags that `vllm serve --help` lists, or None if it lists no flags.

    vLLM lists all of them for --help=all. Versions that do not know this word fail, and list all
    for --help. The answer takes about ten seconds.
    """
    for word in ("--help=all", "--help"):
        try:
            done = subprocess.run(
                [command, "serve", word],
                capture_output=True,
                text=True,
                timeout=ASK_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        names = names_in(_FLAG.findall(done.stdout)) if done.returncode == 0 else set()
        if "--port" in names:
            return frozenset(names)
    return None


def _by_metadata(command: str) -> str | None:
    """Ask the interpreter of the command for its installed vLLM version."""
    return _asked(command, _ASK)


def _has_class(command: str, version: str) -> bool:
    """Return True if the class knows this version, and is installed with it."""
    supported = OLDEST_OF_CLASS <= release_of(version) <= NEWEST_OF_CLASS
    return supported and _asked(command, _ASK_CLASS) is not None


def _asked(command: str, code: str) -> str | None:
    """Return the output of the interpreter in the script's first line, None if it fails."""
    try:
        with open(command, "rb") as script:
            first = script.readline(1_000).decode(errors="replace")
    except OSError as error:
        raise InputError(f"--vllm {command}: {error.strerror}") from error
    python = first.removeprefix("#!").strip()
    if not first.startswith("#!/") or " " in python:
        return None
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except OSError as error:
        raise InputError(f"--vllm {command}: {python}: {error.strerror}") from error
    return done.stdout.strip() if done.returncode == 0 else None


def _by_asking(command: str) -> str:
    try:
        done = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--vllm {command}: `vllm --version` does not answer: {error}") from error
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    match = re.search(r"\d+\.\d+\S*", lines[-1]) if lines and done.returncode == 0 else None
    if match is None:
        reason = lines[-1].strip() if lines else f"it ended with status {done.returncode}"
        raise InputError(f"--vllm {command}: `vllm --version` failed: {reason}")
    return match.group()
