"""The options, target, errors and output that all study commands share.

`@study(NAME)` adds the shared options to a command and passes them as one `Study`. The command
declares only its own options, so a new option of all studies is one line here.
"""

import asyncio
import inspect
import shlex
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from functools import wraps
from math import inf, isnan
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.analysis.experiments.result import Result, check_out, finish
from forebay.analysis.experiments.target import StudyFailed, StudyTarget, open_target, sim_config
from forebay.proxy.runtime.event_loop import fast_runner
from forebay.replay.engine.config import EngineConfig
from forebay.traces.command_line.options import AsJson, Force
from forebay.traces.errors import InputError

Work = Coroutine[Any, Any, Result]
Command = Callable[..., None]
SECRET = "api_key"
MOST_TIME_SCALE = 1e6  # the bound of a replay
TARGET = typer.Option("--target", help="URL, or sim:MODEL@GPU.")
ONE = Annotated[str, TARGET]
SEVERAL = Annotated[list[str], TARGET]
FIRST: dict[str, Any] = {
    "target": ONE,
    "out": Annotated[Path, typer.Option("--out", help="Folder for the results.")],
}
LAST: dict[str, tuple[Any, Any]] = {
    "model": (
        Annotated[str | None, typer.Option(help="Model name; default: the one the target lists.")],
        None,
    ),
    "gpu": (
        Annotated[str | None, typer.Option(help="GPU behind a URL: h200 or h200-nvl.")],
        None,
    ),
    "api_key": (
        Annotated[
            str | None, typer.Option("--api-key", envvar="FOREBAY_API_KEY", help="Bearer token.")
        ],
        None,
    ),
    "vllm_version": (
        Annotated[
            str | None,
            typer.Option("--vllm-version", help="Scheduler of a sim: target; default: the latest."),
        ],
        None,
    ),
    "time_scale": (
        Annotated[
            float,
            typer.Option("--time-scale", help="Time scale of a simulated engine behind the URL."),
        ],
        1.0,
    ),
    "force": (Force, False),
    "as_json": (AsJson, False),
}
Batched = Annotated[
    int | None,
    typer.Option(
        "--max-num-batched-tokens", help="Token budget of a step of a sim: target; default: 8192."
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of lengths and arrivals.")]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", help="URL of an engine behind --target, to measure it directly."),
]
Lengths = Annotated[str, typer.Option("--lengths", help="Prompt tokens; k is 1,024.")]
PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", min=1, help="Prompt tokens of every request.")
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Engines of a sim: target.")]


@dataclass(frozen=True, slots=True)
class Study:
    """The shared options of one call. `line` is the command without secrets."""

    name: str
    line: str
    targets: tuple[str, ...]
    out: Path
    model: str | None
    gpu: str | None
    api_key: str | None
    time_scale: float
    force: bool
    as_json: bool
    vllm_version: str | None = None

    def engine(
        self, target: str, batched: int | None = None, seats: int | None = None
    ) -> EngineConfig:
        """The engine of a sim: target with the shared options. Raises InputError."""
        return sim_config(target, self.gpu, batched, seats, vllm_version=self.vllm_version)

    def open(
        self, text: str | None = None, batched: int | None = None
    ) -> AbstractAsyncContextManager[StudyTarget]:
        """Open the target `text` (default: the first). `batched` is a simulated step's budget."""
        return open_target(
            text or self.targets[0],
            model=self.model,
            gpu=self.gpu,
            api_key=self.api_key,
            time_scale=self.time_scale,
            batched_tokens=batched,
            vllm_version=self.vllm_version,
        )

    def settings(self, server: StudyTarget | None = None, **more: Any) -> dict[str, Any]:
        """The settings that repeat a result."""
        values: dict[str, Any] = {"command": self.line, **more}
        if server is not None:
            values["salt"] = server.about.salt
        return values

    def finish(self, work: Work) -> None:
        """Run `work` and write its result. StudyFailed becomes one line and exit status 1."""
        try:
            with fast_runner() as runner:
                result = runner.run(work)
        except StudyFailed as error:
            print(f"forebay experiment {self.name}: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error
        finish(result, self.out, self.as_json)


def study(name: str, *, several: bool = False) -> Callable[[Command], Command]:
    """Decorate a command that takes a `Study`. `several` allows --target more than once."""

    def with_options(command: Command) -> Command:
        @wraps(command)
        def called(context: typer.Context, **arguments: Any) -> None:
            check_out(arguments["out"], arguments["force"])
            if not 0 < arguments["time_scale"] <= MOST_TIME_SCALE:
                raise InputError(f"--time-scale {arguments['time_scale']:g}: give a number above 0")
            line = command_line(context)
            target = arguments.pop("target")
            shared = {f.name: arguments.pop(f.name) for f in fields(Study) if f.name in arguments}
            targets = tuple(target) if several else (target,)
            command(Study(name=name, line=line, targets=targets, **shared), **arguments)

        # Typer reads this signature: the shared options stand around the command's own.
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        shown = [inspect.Parameter("context", keyword, annotation=typer.Context)]
        for option, kind in FIRST.items():
            kind = SEVERAL if several and option == "target" else kind
            shown.append(inspect.Parameter(option, keyword, annotation=kind))
        shown += [parameter.replace(kind=keyword) for parameter in own]
        for option, (kind, default) in LAST.items():
            shown.append(inspect.Parameter(option, keyword, annotation=kind, default=default))
        called.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
        return called

    return with_options


def integers(text: str, option: str) -> list[int]:
    """Parse `1k,4096,128k` into ascending numbers (k is 1,024). Raises InputError."""
    counts = []
    for word in text.split(","):
        digits, scale = word.strip().lower(), 1
        if digits.endswith("k"):
            digits, scale = digits.removesuffix("k"), 1024
        if not digits.isdecimal() or int(digits) < 1:
            raise InputError(f"{option} {text}: give numbers such as 1k,4096,128000")
        counts.append(int(digits) * scale)
    return sorted(set(counts))


def numbers(text: str, option: str) -> list[float]:
    """Parse `0.5,1,2` into ascending numbers above 0. Raises InputError."""
    values = _ascending(text)
    if not (values[0] > 0 and values[-1] < inf):
        raise InputError(f"{option} {text}: give numbers above 0, such as 0.5,1,2")
    return values


def shares(text: str, option: str) -> list[float]:
    """Parse `0,0.5,1` into ascending shares. Raises InputError."""
    values = _ascending(text)
    if not (values[0] >= 0 and values[-1] <= 1):
        raise InputError(f"{option} {text}: give shares from 0 to 1, such as 0,0.5,1")
    return values


def _ascending(text: str) -> list[float]:
    """Return the numbers of a list, each once, or [-1] if a word is not a number."""
    try:
        values = sorted({float(word) for word in text.split(",")})
    except ValueError:
        return [-1.0]
    return [-1.0] if any(map(isnan, values)) else values


def command_line(context: typer.Context) -> str:
    """The command as typed, without secrets."""
    words = context.command_path.split()
    for name, value in context.params.items():
        if value is None or value is False or name == SECRET:
            continue
        option = {"as_json": "--json"}.get(name, "--" + name.replace("_", "-"))
        if value is True:
            words.append(option)
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            words += [option, str(item)]
    return shlex.join(words)
