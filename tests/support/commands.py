"""Commands that a test runs in its own process: one more process takes half a second to start."""

from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from subprocess import CompletedProcess

from forebay.proxy.cli import main


def forebay(*words: str) -> CompletedProcess[str]:
    """Run a command, and return its exit status and its output."""
    out, err = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = main(list(words))
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return CompletedProcess(words, status, *texts)


def refusal(*words: str) -> str:
    """Run a command that must refuse its words, and return its only line on standard error."""
    done = forebay(*words)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    return line
