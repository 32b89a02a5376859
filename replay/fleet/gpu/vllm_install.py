"""Find vLLM's command, version and flags without importing it, which takes 10 s."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forebay.proxy.vllm_scheduler.settings import NEWEST as NEWEST_OF_CLASS
from forebay.proxy.vllm_scheduler.settings import OLDEST as OLDEST_OF_CLASS
from forebay.traces.ground.errors import InputError

OLDEST = (0, 11)
"""The first version whose flags were checked. Older versions may lack any of them."""
NEWEST = "0.32"
ASK_S = 120.0
_HOW = (
    "install vLLM (https://docs.vllm.ai), e.g. `uv pip install vllm` in an environment of its "
    "own, and give --vllm PATH/bin/vllm; `make vllm-cpu` builds one for the CPU"
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_ASK_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
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
        """Return the major and minor version (InputError: the version has another form)."""
        match = re.match(r"v?(\d+)\.(\d+)", self.version)
        if not match:
            raise InputError(f"--vllm-version {self.version}: give one such as 0.32")
        return int(match[1]), int(match[2])

    def lacks(self, flag: str) -> bool:
        """Return True if the help does not list the flag."""
        return self.flags is not None and flag.partition(".")[0] not in self.flags


def lacks(name: str) -> InputError:
    """Make the error for a flag that is needed, and that the installed vLLM does not have."""
    return InputError(
        f"{name}: this vLLM has no such flag (see `vllm serve --help=all`); leave it out, or give "
        "another --vllm"
    )


def find_vllm(name: str | None) -> VllmInstall:
    """Find the command `name`, else this environment's, else PATH's (InputError: no vllm)."""
    beside = Path(sys.executable).with_name("vllm")
    command = shutil.which(name or (str(beside) if beside.is_file() else "vllm"))
    if command is None:
        missing = f"--vllm {name}: no such command" if name else "vllm is not installed here"
        raise InputError(f"{missing}; {_HOW}")
    command = str(Path(command).absolute())
    # The interpreter of the script answers sooner than the command.
    python = _interpreter(command)
    said = _output(python, "-c", _ASK_VERSION) or _output(command, "--version") or ""
    match = re.search(r"\d+\.\d+\S*", said.rpartition("\n")[2])
    if match is None:
        raise InputError(f"--vllm {command}: `vllm --version` fails: run it to see the reason")
    install = VllmInstall(command, match.group())
    if install.release < OLDEST:
        raise InputError(
            f"{command} is vLLM {install.version}; {OLDEST[0]}.{OLDEST[1]} or later is needed: "
            "pip install -U vllm"
        )
    supported = OLDEST_OF_CLASS <= install.release <= NEWEST_OF_CLASS
    has_class = supported and _output(python, "-c", _ASK_CLASS) is not None
    return VllmInstall(command, install.version, has_class=has_class)


def listed_flags(command: str) -> frozenset[str] | None:
    """Return the flags that `vllm serve --help` lists, or None if it lists no flags.

    vLLM lists all of them for --help=all. Versions that do not know this word fail, and list all
    for --help. The answer takes about ten seconds.
    """
    for word in ("--help=all", "--help"):
        flags = read_flags(_FLAG.findall(_output(command, "serve", word) or ""))
        if "--port" in flags:
            return frozenset(flags)
    return None


def _interpreter(command: str) -> str:
    """Return the interpreter in the first line of a script, empty without one."""
    first = ""
    with suppress(OSError), open(command, "rb") as script:
        first = script.readline(1_000).decode(errors="replace")
    python = first.removeprefix("#!").strip()
    return python if first.startswith("#!/") and " " not in python else ""


def _output(*words: str) -> str | None:
    """Return the standard output of a command, None if it fails."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def read_flags(words: Iterable[str]) -> dict[str, str]:
    """Return the flags in `words`, named as `--max-num-seqs`, with their values.

    A flag without a value has an empty one. Of several values the last counts, as for vLLM.
    """
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, _, value = word[2:].partition("=")
            name = "--" + flag.removeprefix("no-").replace("_", "-")
            flags[name] = value
        elif name:
            flags[name] = flags[name] or word
    return flags
