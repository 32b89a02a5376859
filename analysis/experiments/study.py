"""The skeleton of all studies: options, target, errors, settings and the result.

A study is a subclass of `Study`. Its fields are its own options, its docstring is its help. It
gives `loads`, `row` and `sentence`, and the skeleton does the rest.
"""

import asyncio
import inspect
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from forebay.analysis.experiments.result import Column, Result, Row, check_out, doubted, finish
from forebay.analysis.experiments.target import (
    SIM,
    StudyFailed,
    StudyTarget,
    open_target,
    sim_config,
)
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags, flag_of
from forebay.traces.ground.command_line.options import AsJson, Force, hidden_option, is_given
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.event_loop import fast_runner

SECRET = "api_key"
MOST_TIME_SCALE = 1e6  # the bound of a replay
FIRST = ("targets", "out")  # options that the help lists before those of a study
TARGET = typer.Option(
    "--target", help="URL, or sim:MODEL@GPU, which takes the flags of `forebay engine`."
)
Seed = Annotated[int, typer.Option("--seed", help="Seed of lengths and arrivals.")]
Engines = Annotated[
    list[str] | None,
    typer.Option(help="URL of an engine behind --target, to measure it directly."),
]
Lengths = Annotated[str, typer.Option("--lengths", help="Prompt tokens; k is 1,024.")]
CALIBRATION = inspect.Parameter(
    "calibration",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None, typer.Option(help="Step-time constants, as `engine fit -o` writes them.")
    ],
)
"""Constants of a sim: target, as `forebay engine` takes them."""
PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", min=1, help="Prompt tokens of every request.")
]
Gpus = Annotated[int, typer.Option("--gpus", min=1, help="Engines of a sim: target.")]


@dataclass(kw_only=True)
class Study:
    """One call of a study, with the options that all studies share.

    Attributes:
        NAME: the subcommand.
        COLUMNS: the columns of the table. `Column.when` says which may be left out.
        SEVERAL: whether --target may be given more than once.
        SETTINGS: names of the options that `results.json` repeats.
        LOAD_KEYS: columns that name a load. Set if rows have a verdict: the conclusion then says
            which loads are not valid.
        line: the command without secrets.
        measured: name of the measured servers in the result; default: the target.
        flags: vLLM's flags for a sim: target that were given, by name.
        facts, notes: derived figures and remarks, which `sentence` adds.
    """

    NAME: ClassVar[str] = ""
    COLUMNS: ClassVar[Sequence[Column]] = ()
    SEVERAL: ClassVar[bool] = False
    SETTINGS: ClassVar[Sequence[str]] = ()
    LOAD_KEYS: ClassVar[Sequence[str]] = ()

    targets: Annotated[list[str], TARGET]
    out: Annotated[Path, typer.Option(help="Folder for the results.")]
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the one the target lists.")
    ] = None
    gpu: Annotated[str | None, typer.Option(help="GPU behind a URL: h200 or h200-nvl.")] = None
    api_key: Annotated[str | None, typer.Option(envvar="FOREBAY_API_KEY", help="Bearer token.")] = (
        None
    )
    time_scale: Annotated[
        float, typer.Option(help="Time scale of a simulated engine behind the URL.")
    ] = 1.0
    force: Force = False
    as_json: AsJson = False

    line: str = field(default="", init=False)
    flags: Mapping[str, Any] = field(default_factory=dict, init=False)
    measured: str = field(default="", init=False)
    facts: dict[str, Any] = field(default_factory=dict, init=False)
    notes: list[str] = field(default_factory=list, init=False)
    _opened: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)

    async def loads(self) -> Sequence[Any]:
        """Return the loads of the study, one for each row. Raises InputError for bad options."""
        raise NotImplementedError

    async def row(self, load: Any) -> Row:
        """Measure a load. Its keys are the columns, and more for the sentence."""
        raise NotImplementedError

    async def more(self, rows: Sequence[Row]) -> None:
        """Measure what depends on the rows. Nothing by default."""

    def sentence(self, rows: Sequence[Row]) -> str:
        """Return the conclusion. It may complete the rows, and adds facts and notes."""
        raise NotImplementedError

    def plot(self, rows: Sequence[Row]) -> str:
        """Draw the rows as an SVG document, after `sentence`."""
        raise NotImplementedError

    def columns(self, rows: Sequence[Row]) -> Sequence[Column]:
        """Return the columns that these rows need."""
        return [column for column in self.COLUMNS if column.needed(rows)]

    def note(self, text: str, *, when: object = True) -> None:
        """Add a remark to the result, `when` it applies."""
        if when:
            self.notes.append(text)

    def note_failed(self, rows: Sequence[Row], what: str) -> None:
        """Note how many requests failed, and `what` the table makes of them."""
        failed = sum(row["failed"] for row in rows)
        self.note(f"{failed} requests {what}", when=failed)

    def settings(self) -> dict[str, Any]:
        """Return the settings that repeat the result."""
        return {"command": self.line, **{name: getattr(self, name) for name in self.SETTINGS}}

    @property
    def target(self) -> str:
        return self.targets[0]

    def engine_config(self, **flags: Any) -> EngineConfig:
        """The engine of a sim: target. `flags` count before the given ones. Raises InputError."""
        return sim_config(self.target, self.gpu, **{**self.flags, **flags})

    def flags_of(self, kind: type) -> dict[str, Any]:
        """The given flags that are fields of the dataclass `kind`, too."""
        return {
            item.name: self.flags[item.name] for item in fields(kind) if item.name in self.flags
        }

    async def open(self, target: str, **flags: Any) -> StudyTarget:
        """Open a server for the time of the study. `flags` are a simulated engine's."""
        opening = open_target(
            target,
            model=self.model,
            gpu=self.gpu,
            api_key=self.api_key,
            time_scale=self.time_scale,
            flags={**self.flags, **flags},
        )
        return await self._opened.enter_async_context(opening)

    async def measure(self) -> Result:
        """Measure all loads and draw the conclusion. Raises InputError and StudyFailed."""
        async with self._opened:
            rows = [await self.row(load) for load in await self.loads()]
            await self.more(rows)
            return self.conclude(rows)

    def conclude(self, rows: list[Row]) -> Result:
        """Return the result of measured rows."""
        words = self.sentence(rows)
        if self.LOAD_KEYS:
            words = doubted(words, self.notes, rows, *self.LOAD_KEYS)
        columns, plot = self.columns(rows), self.plot(rows)
        measured, settings = self.measured or self.target, self.settings()
        return Result(
            self.NAME, measured, words, columns, rows, self.facts, plot, self.notes, settings
        )

    def run(self) -> None:
        """Measure and write the result. StudyFailed becomes one line and exit status 1."""
        check_out(self.out, self.force)
        if not 0 < self.time_scale <= MOST_TIME_SCALE:
            raise InputError(f"--time-scale {self.time_scale:g}: give a number above 0")
        by_url = any(not target.startswith(SIM) for target in self.targets)
        for name in self.flags if by_url else ():
            if not hasattr(self, name):
                raise InputError(
                    f"{flag_of(name)}: only for a sim: target; a server runs what it runs"
                )
        try:
            with fast_runner() as runner:
                result = runner.run(self.measure())
        except StudyFailed as error:
            print(f"forebay experiment {self.NAME}: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except asyncio.CancelledError as error:
            raise KeyboardInterrupt from error
        finish(result, self.out, self.as_json)


def command(kind: type[Study]) -> Callable[..., None]:
    """Return the Typer command of a study: an option for each field, its own before the shared."""

    own = inspect.signature(kind, eval_str=True).parameters
    flags = dict(inspect.signature(EngineFlags, eval_str=True).parameters)
    flags[CALIBRATION.name] = CALIBRATION

    def called(context: typer.Context, *, targets: Any, **arguments: Any) -> None:
        options = {name: value for name, value in arguments.items() if name in own}
        study = kind(targets=targets if kind.SEVERAL else [targets], **options)
        study.line = command_line(context)
        study.flags = {name: arguments[name] for name in flags if is_given(context, name)}
        study.run()

    def place(option: inspect.Parameter) -> tuple[bool, int]:
        holders = [option.name in inspect.get_annotations(base) for base in kind.__mro__]
        return option.name not in FIRST, holders.index(True)

    shown = sorted(own.values(), key=place)
    if not kind.SEVERAL:
        shown[0] = shown[0].replace(annotation=Annotated[str, TARGET])
    keyword = inspect.Parameter.KEYWORD_ONLY
    shown.insert(0, inspect.Parameter("context", keyword, annotation=typer.Context))
    # The flags of `forebay engine` are read as well, without a line in the help of each study.
    shown += [hidden_option(flag) for name, flag in flags.items() if name not in own]
    called.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return called


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
    return _ascending(text, option, lambda n: 0 < n < inf, "numbers above 0, such as 0.5,1,2")


def shares(text: str, option: str) -> list[float]:
    """Parse `0,0.5,1` into ascending shares. Raises InputError."""
    return _ascending(text, option, lambda n: 0 <= n <= 1, "shares from 0 to 1, such as 0,0.5,1")


def _ascending(text: str, option: str, fits: Callable[[float], bool], what: str) -> list[float]:
    """Return the numbers of a list, each once. Raises InputError unless all of them fit."""
    with suppress(ValueError):
        values = {float(word) for word in text.split(",")}
        if all(map(fits, values)):  # NaN never fits
            return sorted(values)
    raise InputError(f"{option} {text}: give {what}")


def command_line(context: typer.Context) -> str:
    """The command as typed, without secrets."""
    words = context.command_path.split()
    options = {option.name: option for option in context.command.params}
    for name, value in context.params.items():
        option = options[name]
        if value is None or name == SECRET:
            continue
        if (value is False or getattr(option, "hidden", False)) and not is_given(context, name):
            continue
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, bool):
                words += option.opts[:1] if item else option.secondary_opts[:1]
            else:
                words += [option.opts[0], str(item)]
    return shlex.join(words)
