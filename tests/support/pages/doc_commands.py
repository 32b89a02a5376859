"""Run the commands that the documentation shows with their output."""

import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

WIDTH = 80


@cache
def _folder() -> Path:
    """A folder with the trace that the examples read."""
    folder = Path(tempfile.mkdtemp(prefix="forebay-docs-"))
    _run("forebay traces synth chat-beside-documents --duration 300 -o trace.jsonl", folder)
    return folder


def output_of(command: str) -> str:
    """Return a block with a command and its output. Raises CalledProcessError.

    `COMMAND | first N` keeps the first N lines.
    """
    shown, _, first = command.partition(" | first ")
    lines = _run(shown, _folder()).splitlines()
    rows = [line.rstrip() for line in lines]
    if first:
        rows = [*rows[: int(first)], "..."]
    text = "\n".join(rows).strip("\n")
    return f"```console\n$ {shown}\n{text}\n```"


@cache
def _run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "forebay", command
    paths = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path if entry)
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from forebay.proxy.cli import main; sys.exit(main())",
         *words[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return done.stdout
