"""What every study's command has in common: its options, its target, its errors, its end.

`@study(NAME)` gives a command the shared options and hands them over as one `Study`; the command
adds what is its own. So a new option of all studies is one line here.
"""

import asyncio
import inspect
import shlex
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.analysis.experiments.result import Result, check_out, finish
from forebay.analysis.experiments.target import StudyFailed, StudyTarget, open_target
from forebay.proxy.runtime.event_loop import fast_runner
from forebay.traces.errors import InputError

Work = Coroutine[Any, Any, Result]
Command = Callable[..., None]
SECRET = "api_key"
MOST_TIME_SCALE = 1e6  # as of a replay
ONE = Annotated[str, typer.Option("--target", help="URL, or sim:MODEL@GPU.")]
SEVERAL = Annotated[list[str], typer.Option("--target", help="URL, or sim:MODEL@GPU.")]
FIRST: dict[str, Any] = {
    "target": ONE,
    "out": Annotated[Path, typer.Option("--out", help="Folder for the results.")],
}
LAST: dict[str, tuple[Any, Any]] = {
    "model": (
        Annotated[str | None, typer.Option(help="Default: the one the target lists.")],
        None,
    ),
    "gpu": (
        Annotated[str | None, typer.Option(help="Of a URL, its data sheet: h200 or h200-nvl.")],
        None,
    ),
    "api_key": (
        Annotated[
            str | None, typer.Option("--api-key", envvar="FOREBAY_API_KEY", help="Bearer token.")
        ],
        None,
    ),
    "time_scale": (
        Annotated[
            float, typer.Option("--time-scale", help="Of a simulated engine behind the URL.")
        ],
        1.0,
    ),
    "force": (Annotated[bool, typer.Option("--force", help="Overwrite results.")], False),
    "as_json": (
        Annotated[bool, typer.Option("--json", help="Print data instead of a table.")],
        False,
    ),
}
Batched = Annotated[
    int | None,
    typer.Option("--max-num-batched-tokens", help="Of a sim: target; default: 8192."),
]
Seed = Annotated[int, typer.Option("--seed", help="Of lengths and arrivals.")]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", help="URL of an engine behind --target: asked directly, too."),
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Engines of a sim: target.")]


@dataclass(frozen=True, slots=True)
class Study:
    """One call of a study, as the user gave it; `line` is the command, secrets left out."""

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

    def open(
        self, text: str | None = None, batched: int | None = None
    ) -> AbstractAsyncContextManager[StudyTarget]:
        """The target `text` (default: the first), `batched` its step budget where simulated."""
        return open_target(
            text or self.targets[0],
            model=self.model,
            gpu=self.gpu,
            api_key=self.api_key,
            time_scale=self.time_scale,
            batched_tokens=batched,
        )

    def settings(self, server: StudyTarget | None = None, **more: Any) -> dict[str, Any]:
        """What a result needs to be repeated."""
        told: dict[str, Any] = {"command": self.line, **more}
        if server is not None:
            told["salt"] = server.about.salt
        return told

    def finish(self, work: Work) -> None:
        """Run `work` and leave its result; a target that fails it is one line and status 1."""
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
    """A command whose first argument is the `Study`; `several`: --target may be given again."""

    def with_options(command: Command) -> Command:
        @wraps(command)
        def called(context: typer.Context, **given: Any) -> None:
            check_out(given["out"], given["force"])
            if not 0 < given["time_scale"] <= MOST_TIME_SCALE:
                raise InputError(f"--time-scale {given['time_scale']:g}: give a number above 0")
            line = command_line(context)
            target = given.pop("target")
            shared = {f.name: given.pop(f.name) for f in fields(Study) if f.name in given}
            targets = tuple(target) if several else (target,)
            command(Study(name=name, line=line, targets=targets, **shared), **given)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        keyword = inspect.Parameter.KEYWORD_ONLY
        shown = [inspect.Parameter("context", keyword, annotation=typer.Context)]
        for option, kind in FIRST.items():
            kind = SEVERAL if several and option == "target" else kind
            shown.append(inspect.Parameter(option, keyword, annotation=kind))
        shown += [one.replace(kind=keyword) for one in own]
        for option, (kind, default) in LAST.items():
            shown.append(inspect.Parameter(option, keyword, annotation=kind, default=default))
        called.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        called.__annotations__ = {one.name: one.annotation for one in shown}
        return called

    return with_options


def integers(text: str, option: str) -> list[int]:
    """`1k,4096,128k` as numbers; k is 1,024. Raises InputError."""
    found = []
    for word in text.split(","):
        digits, scale = word.strip().lower(), 1
        if digits.endswith("k"):
            digits, scale = digits.removesuffix("k"), 1024
        if not digits.isdecimal() or int(digits) < 1:
            raise InputError(f"{option} {text}: give numbers such as 1k,4096,128000")
        found.append(int(digits) * scale)
    return sorted(set(found))


def numbers(text: str, option: str) -> list[float]:
    """`0.5,1,2` as numbers above 0, ascending. Raises InputError."""
    found = set()
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise InputError(f"{option} {text}: give numbers above 0, such as 0.5,1,2")
        found.add(value)
    return sorted(found)


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
