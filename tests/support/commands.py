"""Commands that a test runs in its own process: one more process takes half a second to start."""

from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from subprocess import CompletedProcess

from forebay.proxy.cli import main
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import read_trace


def forebay(*words: str | Path) -> CompletedProcess[str]:
    """Run a command, and return its exit status and its output."""
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = main([str(word) for word in words])
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return CompletedProcess(words, status, *texts)


def printed(*words: str | Path) -> str:
    """Run a command that must succeed, and return its standard output."""
    done = forebay(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def remarks(*words: str | Path) -> str:
    """Run a command that must succeed, and return its standard error."""
    done = forebay(*words)
    assert done.returncode == 0, done.stderr
    return done.stderr


def refusal(*words: str | Path) -> str:
    """Run a command that must refuse its words, and return its only line on standard error."""
    done = forebay(*words)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    return line


def imported(path: Path, *words: str | Path) -> tuple[list[TraceRequest], str]:
    """Import a file of unknown format, and return its requests and what the command remarks."""
    out = path.with_suffix(".trace")
    said = remarks("traces", "import", "auto", path, "-o", out, "--force", *words)
    return list(read_trace(out)), said
