"""A command that takes its options as a dataclass has one option for each field."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer

from forebay.proxy.command import new_app, run_command
from forebay.traces.command_line.options import takes_options


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
