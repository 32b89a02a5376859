"""The options every study shares, and how its command line is written down."""

import asyncio
import shlex
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from forebay.analysis.experiments.target import StudyFailed
from forebay.proxy.event_loop import fast_runner
from forebay.traces.errors import InputError

T = TypeVar("T")

TargetText = Annotated[str, typer.Option("--target", help="URL, or sim:MODEL@GPU.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Model = Annotated[str | None, typer.Option("--model", help="Default: the one the target lists.")]
Gpu = Annotated[
    str | None, typer.Option("--gpu", help="Of a URL, for shares of peak: h200 or h200-nvl.")
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="FOREBAY_API_KEY", help="Bearer token.")
]
TimeScale = Annotated[
    float, typer.Option("--time-scale", help="Of a simulated engine behind the URL.")
]
Batched = Annotated[
    int | None,
    typer.Option("--max-num-batched-tokens", help="Of a sim: target.  [default: 8192]"),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite results.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
SECRET = "api_key"


def integers(text: str, option: str) -> list[int]:
    """`1k,4096,128k` as numbers; k is 1,024. Raises InputError."""
    found = []
    for word in text.split(","):
        digits, scale = (word.strip().lower().removesuffix("k"), 1024) if (
            word.strip().lower().endswith("k")
        ) else (word.strip(), 1)  # fmt: skip
        if not digits.isdecimal() or int(digits) < 1:
            raise InputError(f"{option} {text}: give numbers such as 1k,4096,128000")
        found.append(int(digits) * scale)
    return sorted(set(found))


def command_line(context: typer.Context) -> str:
    """The command as it would be typed, secrets left out."""
    words = context.command_path.split()
    for name, value in context.params.items():
        if value is None or value is False or name == SECRET:
            continue
        option = {"as_json": "--json"}.get(name, "--" + name.replace("_", "-"))
        if value is True:
            words.append(option)
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [option, str(one)]
    return shlex.join(words)


def run_study(work: Coroutine[Any, Any, T], name: str) -> T:
    """Run it; a target that fails it is one line on stderr and exit status 1."""
    try:
        with fast_runner() as runner:
            return runner.run(work)
    except StudyFailed as error:
        print(f"forebay experiment {name}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
