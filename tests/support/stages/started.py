"""Processes that a test starts, waits for and ends."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
LONGEST_S = 500.0  # of a command
FOREBAY = (sys.executable, "-m", "forebay.proxy")


def eventually(what: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """Return the first true answer of `what`, which is called five times a second."""
    until = time.monotonic() + patience_s
    while not (answer := what()):
        assert time.monotonic() < until, f"{what} did not become true in {patience_s:g} s"
        time.sleep(0.2)
    return answer


def answers(url: str) -> bool:
    """True if `url` answers with success."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def run_forebay(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own, to its end."""
    return subprocess.run(
        [*FOREBAY, *words], capture_output=True, text=True, env={**os.environ, **environ},
        timeout=LONGEST_S,
    )  # fmt: skip


def printed_with_two_hash_seeds(program: str) -> set[str]:
    """Return the output of the Python program in two processes that hash strings differently."""
    return {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip


@contextmanager
def started(
    words: Sequence[str], log: Path, ready: str, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `words`, output in `log`, from when the URL `ready` answers until the block ends."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environ}
        )
    try:

        def up() -> bool:
            assert process.poll() is None, log.read_text()[-2000:]
            return answers(ready)

        eventually(up)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
