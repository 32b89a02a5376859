"""Options that several commands share, and commands that get their options as one object."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from forebay.traces.command_line.quantities import seconds
from forebay.traces.errors import InputError

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


Output = Annotated[str, typer.Option("--out", "-o", help="file for the trace; - is stdout")]
Force = Annotated[bool, typer.Option("--force", help="overwrite existing files")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="skip and count bad rows instead of stopping at one")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Seed = Annotated[int, typer.Option("--seed", help="seed; equal seeds make equal traces")]
Arrivals = Annotated[str, typer.Option("--arrivals", help="poisson, constant or burst")]
Rate = Annotated[float, typer.Option("--rate", help="requests a second")]


def takes_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command` one option for each field of every dataclass among its parameters.

    A field is annotated as Typer wants a parameter: `Annotated[int, typer.Option(help="...")]`.
    """
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @wraps(command)
    def called(**arguments: Any) -> Result:
        for name, kind in kinds.items():
            arguments[name] = kind(
                **{field.name: arguments.pop(field.name) for field in fields(kind)}
            )
        return command(**arguments)

    shown: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind = kinds.get(name)
        group = inspect.signature(kind, eval_str=True).parameters.values() if kind else [parameter]
        shown += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in group]
    called.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return called
