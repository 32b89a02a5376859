"""The `forebay` command: each word loads only the module that serves it.

Exit status: 0 done, 1 ran but found a failure it was asked to check, 2 bad usage or bad input.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

# word: (module:attribute of a Typer app, one line of help)
COMMANDS = {
    "demo": ("forebay.analysis.demo:app", "engines, proxy, replay and report with no GPU"),
    "proxy": ("forebay.proxy.proxy_cli:app", "the load-shaping proxy in front of vLLM servers"),
    "explain": (
        "forebay.proxy.telemetry.explain_cli:app",
        "why a request went there, waited or was refused",
    ),
    "engine": ("forebay.replay.engine.cli:app", "one simulated vLLM server"),
    "fleet": ("forebay.replay.fleet.cli:app", "real vLLM servers, one on each GPU"),
    "replay": ("forebay.replay.cli:app", "replay a trace at a set arrival rate"),
    "traces": ("forebay.traces.cli:app", "import, describe and make traces"),
    "experiment": ("forebay.analysis.experiments.cli:app", "studies of one server"),
    "report": ("forebay.analysis.cli:report_app", "one HTML page from one or more runs"),
    "compare": ("forebay.analysis.cli:compare_app", "two runs side by side"),
    "simulate": ("forebay.replay.sim.cli:app", "a fleet in virtual time: what if"),
    "kv": ("forebay.analysis.kv.cli:app", "KV-cache arithmetic, and a check against a real vLLM"),
    "size": ("forebay.analysis.sizing.cli:app", "how many GPUs for so many users, by simulation"),
    "bench": ("forebay.analysis.bench:app", "the measurements the README quotes"),
}


def usage() -> str:
    words = "\n".join(f"  {word:<10}  {text}" for word, (_, text) in COMMANDS.items())
    return (
        "usage: forebay COMMAND ...\n\n"
        "Shape, replay and measure long-context traffic in front of OpenAI-compatible vLLM.\n\n"
        f"{words}\n\n"
        "example:  forebay proxy --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002\n"
        "`forebay COMMAND --help` says more."
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"forebay {version('forebay')}")
        return 0
    if words[0] not in COMMANDS:
        print(f"forebay: no command {words[0]!r}; one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    from forebay.proxy.command import run_command

    module, attribute = COMMANDS[words[0]][0].split(":")
    return run_command(getattr(import_module(module), attribute), words[0], words[1:])
