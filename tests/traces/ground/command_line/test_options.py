"""A command that takes its options as a dataclass has one option for each field."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer

from forebay.traces.ground.command_line.command import new_app, run_command
from forebay.traces.ground.command_line.options import given_options, takes_options


@dataclass(frozen=True, slots=True)
class Baking:
    bread: Annotated[Path, typer.Argument(help="Recipe.")]
    minutes: Annotated[int, typer.Option(min=1, help="Time in the oven.")] = 40
    crust: Annotated[bool, typer.Option(help="Bake it dark.")] = True


def baked(*words: str) -> tuple[int, list[tuple[str, Baking]]]:
    """The exit status, and what the command was called with."""
    app, calls = new_app(), list[tuple[str, Baking]]()

    @app.command()
    @takes_options
    def bake(
        context: typer.Context,
        baking: Baking,
        oven: Annotated[str, typer.Option(help="Which oven.")] = "stone",
    ) -> None:
        calls.append((oven, baking))

    return run_command(app, "bake", words), calls


def test_fields_and_parameters_are_options() -> None:
    assert baked("rye") == (0, [("stone", Baking(Path("rye")))])
    given = baked("rye", "--minutes", "60", "--no-crust", "--oven", "gas")
    assert given == (0, [("gas", Baking(Path("rye"), 60, False))])


def test_fields_are_checked_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert baked("rye", "--minutes", "0")[0] == 2
    assert "--minutes" in capsys.readouterr().err
    assert baked("--help") == (0, [])
    shown = capsys.readouterr().out
    for word in ("Recipe.", "--minutes", "Time in the oven.", "--[no-]crust", "--oven", "40"):
        assert word in shown


@dataclass(frozen=True, slots=True)
class Oven:
    kind: str = "stone"
    minutes: int = 5


def test_a_field_without_an_option_keeps_its_default_or_takes_a_value_by_name() -> None:
    app, calls = new_app(), list[Oven]()

    @app.command()
    @takes_options
    def bake(oven: Oven, baking: Baking) -> None:
        calls.append(oven)

    assert run_command(app, "bake", ["rye", "--minutes", "60"]) == 0
    assert calls == [Oven("stone", 60)]
    assert run_command(app, "bake", ["rye", "--kind", "gas"]) == 2


@dataclass(frozen=True, slots=True)
class Kneading:
    minutes: Annotated[int, typer.Option(help="Time on the table.")] = 5

    def __post_init__(self) -> None:
        assert self.minutes < 60, "too long for a table"


def test_a_command_makes_an_object_when_it_needs_it() -> None:
    """Of two options with one name the first is shown, and both objects get its value."""
    app, calls = new_app(), list[tuple[Baking, Callable[..., Kneading]]]()

    @app.command()
    @takes_options
    def bake(baking: Baking, new_kneading: Callable[..., Kneading]) -> None:
        calls.append((baking, new_kneading))

    assert run_command(app, "bake", ["rye", "--minutes", "70"]) == 0
    ((baking, new_kneading),) = calls
    assert baking.minutes == 70
    with pytest.raises(AssertionError, match="too long"):
        new_kneading()
    assert new_kneading(minutes=9) == Kneading(9)


def test_a_default_that_was_typed_counts_as_given() -> None:
    app, calls = new_app(), list[dict[str, object]]()

    @app.command()
    @takes_options
    def bake(context: typer.Context, baking: Baking) -> None:
        calls.append(given_options(context, baking))

    assert run_command(app, "bake", ["rye", "--minutes", "40"]) == 0
    assert calls == [{"bread": Path("rye"), "minutes": 40}]
