"""The `forebay` command: each word loads only the module that implements it.

Exit status: 0 success, 1 a requested check failed, 2 bad usage or bad input.
"""

import errno
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec

CLOSED_PIPE = 141  # the status of a program that SIGPIPE ends

# word: (module:attribute of a Typer app, help text)
COMMANDS = {
    "demo": (
        "forebay.analysis.demo.demo:app",
        "the whole toolkit on this machine, without a GPU",
    ),
    "completion": ("forebay.proxy.completion:app", "a completion script for bash, zsh or fish"),
    "proxy": ("forebay.proxy.proxy_cli:app", "the load-shaping proxy in front of vLLM servers"),
    "drain": ("forebay.proxy.operate.drain_cli:app", "take one backend out of use, and back"),
    "top": ("forebay.proxy.diagnose.top_cli:app", "a running proxy in the terminal, each second"),
    "doctor": (
        "forebay.proxy.diagnose.doctor_cli:app",
        "what is wrong with a running proxy and its backends",
    ),
    "explain": (
        "forebay.proxy.diagnose.explain_cli:app",
        "why a request was routed, delayed or rejected",
    ),
    "fleet": ("forebay.replay.fleet.cli:app", "real vLLM servers, one on each GPU"),
    "traces": ("forebay.traces.cli.main:app", "import, describe and synthesise traces"),
    "replay": (
        "forebay.replay.cli:app",
        "send the requests of a trace at a given rate",
    ),
    "search": (
        "forebay.analysis.search.cli:app",
        "the highest load that meets latency targets",
    ),
    "report": ("forebay.analysis.cli:report_app", "HTML report of one or more replay runs"),
    "compare": (
        "forebay.analysis.cli:compare_app",
        "compare replay runs, and fail on a regression",
    ),
    "runs": (
        "forebay.analysis.runs.runs_cli:app",
        "merge runs, and write them in the formats of other tools",
    ),
    "engine": ("forebay.replay.validation.cli:app", "one simulated vLLM server"),
    "simulate": ("forebay.replay.sim.cli:app", "simulate a fleet in virtual time"),
    "size": (
        "forebay.analysis.sizing.cli:app",
        "GPUs needed for a number of users, by simulation",
    ),
    "kv": (
        "forebay.analysis.kv.cli:app",
        "KV-cache arithmetic, and a check against a real vLLM",
    ),
    "tune": ("forebay.analysis.tune.cli:app", "what other routers, flags and GPUs would bring"),
    "experiment": ("forebay.analysis.experiments.cli:app", "run measurement studies on a server"),
}
HEADINGS = {
    "proxy": "\nServe:\n", "traces": "\nMeasure:\n", "engine": "\nSimulate and plan:\n",
}  # fmt: skip
"""Lines of the help before the first word of each group."""


def is_compiled() -> bool:
    """True if the policy is machine code, which takes less processor time for each request."""
    spec = find_spec("forebay.proxy.core.shaper")
    return spec is not None and not (spec.origin or "").endswith(".py")


def usage() -> str:
    words = "\n".join(
        f"{HEADINGS.get(word, '')}  {word:<10}  {text}" for word, (_, text) in COMMANDS.items()
    )
    return (
        "Usage: forebay COMMAND [OPTIONS]\n\n"
        "A proxy for vLLM that keeps chats fast beside long documents, with a load\n"
        "generator, a simulator and tools for traces and reports.\n\n"
        f"{words}\n\n"
        "Example:\n\n"
        "  forebay proxy --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002\n\n"
        "`forebay COMMAND --help` shows its options."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status, even if its output cannot be written."""
    try:
        status = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:
        status = CLOSED_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = error.filename or "the output"
        print(f"forebay: cannot write {where}: {error.strerror}; make room", file=sys.stderr)
        status = 2
    else:
        return status
    # Python writes the rest of the output when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return status


def run(words: list[str]) -> int:
    """Run a command, and return its exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        policy = "compiled" if is_compiled() else "interpreted"
        print(f"forebay {version('forebay')} ({policy} policy)")
        return 0
    if words[0] == "__complete":
        from forebay.proxy.completion import candidates

        print("\n".join(candidates(words[1:], COMMANDS)))
        return 0
    if words[0] not in COMMANDS:
        close = get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of: {', '.join(COMMANDS)}"
        print(f"forebay: no command {words[0]!r}; {hint}", file=sys.stderr)
        return 2
    from forebay.traces.ground.command_line.command import run_command

    module, attribute = COMMANDS[words[0]][0].split(":")
    return run_command(getattr(import_module(module), attribute), words[0], words[1:])
