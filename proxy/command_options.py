"""Let a Typer command take its options as one dataclass instead of as many parameters."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar

Result = TypeVar("Result")


def takes_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Give `command` one option for each field of every dataclass among its parameters.

    A field is annotated as Typer wants a parameter: `Annotated[int, typer.Option(help="...")]`.
    """
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, Any] = {
        name: one.annotation
        for name, one in signature.parameters.items()
        if is_dataclass(one.annotation)
    }

    @wraps(command)
    def called(**given: Any) -> Result:
        for name, kind in kinds.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return command(**given)

    shown: list[inspect.Parameter] = []
    for name, one in signature.parameters.items():
        kind = kinds.get(name)
        group = inspect.signature(kind, eval_str=True).parameters.values() if kind else [one]
        shown += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in group]
    called.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in shown}
    return called
