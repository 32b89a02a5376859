"""Define options that several commands share, and commands that take all options as one object."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

T = TypeVar("T")

Output = Annotated[str, typer.Option("--output", "-o", help="file for the trace; - is stdout")]
Force = Annotated[bool, typer.Option("--force", help="overwrite existing files")]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="skip and count bad rows instead of stopping at one")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Seed = Annotated[int, typer.Option("--seed", help="seed; equal seeds make equal traces")]
Arrivals = Annotated[str, typer.Option("--arrivals", help="poisson, constant or burst")]
Rate = Annotated[float, typer.Option("--rate", help="requests a second")]


def takes(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command whose options are the fields of the dataclass `options`.

    Typer reads options from the parameters of a function, so it is shown one parameter for each
    field. The command itself gets one object. Each field is an `Annotated[TYPE, typer.Option(...)]`
    with its default.
    """

    def shown_to_typer(command: Callable[[T], None]) -> Callable[..., None]:
        @wraps(command)
        def called(**given: Any) -> None:
            command(options(**given))

        kinds = get_type_hints(options, include_extras=True)
        called.__annotations__ = kinds
        called.__signature__ = Signature(  # type: ignore[attr-defined]
            [
                Parameter(
                    field.name,
                    Parameter.KEYWORD_ONLY,
                    annotation=kinds[field.name],
                    default=Parameter.empty if field.default is MISSING else field.default,
                )
                for field in fields(options)  # type: ignore[arg-type]
            ]
        )
        return called

    return shown_to_typer
