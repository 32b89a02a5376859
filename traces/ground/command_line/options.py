"""Options that several commands share, and commands that get their options as one object."""

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from forebay.traces.ground.buckets import DEFAULT_BUCKETS
from forebay.traces.ground.command_line.quantities import seconds
from forebay.traces.ground.errors import InputError

Result = TypeVar("Result")


def time_option(text: str) -> float:
    """Parse a time option of Typer, such as `90`, `3m` or `500ms`, as seconds."""
    try:
        return float(seconds(text))
    except ValueError:
        raise typer.BadParameter("give a time such as 90, 3m or 500ms") from None


def a_time(help_text: str, *names: str, least_s: float = 0.0) -> Any:
    """Make an option for a time of at least `least_s`."""

    def parse(text: str) -> float:
        value_s = time_option(text)
        if value_s < least_s:
            raise typer.BadParameter(f"give at least {least_s:g} s")
        return value_s

    return typer.Option(*names, parser=parse, metavar="<time>", help=help_text)


def one_or_more(counts: dict[str, int | None]) -> None:
    """Raise InputError for an option whose value is less than 1. None is no value."""
    for option, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"{option} {value}: give 1 or more")


Output = Annotated[str, typer.Option("--out", "-o", help="file to write; - is stdout")]
Force = Annotated[bool, typer.Option("--force", help="overwrite existing files")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="skip and count bad rows instead of stopping at one")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Seed = Annotated[int, typer.Option(help="seed; equal seeds make equal traces")]
Arrivals = Annotated[str, typer.Option(help="poisson, constant or burst")]
Rate = Annotated[float, typer.Option("--rate", help="requests a second")]
MeanRate = Annotated[float | None, typer.Option("--rate", help="mean requests a second")]
EngineModel = Annotated[str, typer.Option(help="model of the engines")]
EngineGpu = Annotated[str, typer.Option(help="GPU of the engines")]
Jobs = Annotated[int | None, typer.Option(min=1, help="processes; default: all cores")]
FormatName = Annotated[
    str | None, typer.Option("--format", help="as traces formats lists them; default: detect")
]
# Options about the service that gets the requests.
ApiKey = Annotated[
    str | None, typer.Option(envvar="FOREBAY_API_KEY", help="sent as a bearer token")
]
AskedModel = Annotated[
    str | None, typer.Option(help="model to ask for; default: the one the target lists")
]
Buckets = Annotated[str, typer.Option(help="length buckets, as NAME:MOST_PROMPT_TOKENS")]
BUCKETS = ",".join(f"{bucket.name}:{bucket.up_to}" for bucket in DEFAULT_BUCKETS)
Endpoint = Annotated[str, typer.Option(help="completions or chat")]
Turns = Annotated[
    str,
    typer.Option(
        help="when later turns leave: wait (after the answers before), or trace (as recorded)"
    ),
]
TimeScale = Annotated[
    float, typer.Option(help="simulated seconds in a wall second, as the engine's")
]
TraceArgument = Annotated[Path, typer.Argument(help="trace file; - is standard input")]
GapSeed = Annotated[int, typer.Option(help="seed of random arrival gaps")]
TooLong = Annotated[
    str, typer.Option(help="rows beyond the model's context: error, truncate or drop")
]
SkipBadRows = Annotated[bool, typer.Option("--skip-bad", help="skip and count bad rows")]
SloText = Annotated[
    str | None,
    typer.Option(help="targets, e.g. chat.ttft=2s,session.e2e=5m; default: chat 2s, document 15s"),
]
Speed = Annotated[float | None, typer.Option(help="pace as a multiple of the trace's own")]
Duration = Annotated[float | None, a_time("stop arrivals after this time", "--duration")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """The trace that a command plays, and the targets that its answers must meet."""

    trace: TraceArgument
    arrivals: Annotated[str, typer.Option(help="trace, constant, poisson or gamma:CV")] = "trace"
    seed: GapSeed = 0
    too_long: TooLong = "error"
    format_name: FormatName = None
    skip_bad: SkipBadRows = False
    slo: SloText = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedTrafficOptions(TrafficOptions):
    """The same, at a pace and for a time that may differ from the trace's."""

    rate: MeanRate = None
    speed: Speed = None
    duration: Duration = None


def same_named(options: Any, kind: type) -> dict[str, Any]:
    """Return the options that are fields of the dataclass `kind`, too."""
    names = {field.name for field in fields(options)}
    return {
        field.name: getattr(options, field.name) for field in fields(kind) if field.name in names
    }


def given_options(context: typer.Context, options: Any) -> dict[str, Any]:
    """Return the options that the user gave, even those with the value of their default."""
    return {
        field.name: getattr(options, field.name)
        for field in fields(options)
        if is_given(context, field.name)
    }


def is_given(context: typer.Context, name: str) -> bool:
    """Return True if the user gave an option, even with the value of its default."""
    return getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"


def hidden_option(option: inspect.Parameter) -> inspect.Parameter:
    """Return an option that a command takes without a line in its help."""
    kind, info = get_args(option.annotation)
    info = copy(info)
    info.hidden = True
    return option.replace(annotation=Annotated[kind, info])


def takes_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command` one option for each field of every dataclass among its parameters.

    A field is annotated as Typer wants a parameter: `Annotated[int, typer.Option(help="...")]`.
    A parameter of type `Callable[..., Kind]` gets a function that makes the object, for a command
    that may not need it. A parameter of type `Annotated[Protocol, Kind]` gets an object of `Kind`.
    Of equal names, the first parameter's option is shown. A field without an annotation for Typer
    is no option, and keeps its default unless an option has its name.
    """
    # Find the dataclasses, and which of them the command makes itself.
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, Any] = {}
    deferred = set()
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation  # of the object, or of a function that makes it
        if (origin := get_origin(kind)) in (Callable, Annotated):
            kind = get_args(kind)[1]
        if origin is Callable:
            deferred.add(name)
        if is_dataclass(kind):
            kinds[name] = kind

    # The command as Typer calls it, with all options by name.
    @wraps(command)
    def called(**arguments: Any) -> Result:
        makers: dict[str, Any] = {}
        for name, kind in kinds.items():
            names = {field.name for field in fields(kind)} & arguments.keys()
            makers[name] = partial(kind, **{name: arguments[name] for name in names})
        own = {name: arguments[name] for name in signature.parameters if name not in kinds}
        for name in makers.keys() - deferred:
            makers[name] = makers[name]()
        return command(**own, **makers)

    # Typer reads the options from the signature.
    shown: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        for each in _options_of(kinds[name]) if name in kinds else [parameter]:
            shown.setdefault(each.name, each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    called.__signature__ = inspect.Signature([*shown.values()])  # type: ignore[attr-defined]
    called.__annotations__ = {name: parameter.annotation for name, parameter in shown.items()}
    return called


def _options_of(kind: Any) -> list[inspect.Parameter]:
    """Return the options of a class: its own first, then the inherited ones."""
    parameters = inspect.signature(kind, eval_str=True).parameters.values()
    options = [each for each in parameters if hasattr(each.annotation, "__metadata__")]
    return sorted(options, key=lambda option: option.name not in kind.__annotations__)
