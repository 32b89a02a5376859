"""Run a Typer command. Bad input becomes one line on stderr and exit status 2."""

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer._click.exceptions import ClickException  # Typer bundles Click, and exports no base class

from forebay.traces.ground.command_line.help_text import PlainTyper
from forebay.traces.ground.command_line.messages import be_quiet, is_quiet, printable_lines
from forebay.traces.ground.command_line.plain_words import plain_words
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.redaction import without_user_info

EXTRAS = {"jinja2": "load", "pyarrow": "load", "scipy": "lab", "tokenizers": "tokenizers"}
"""Packages that the proxy does not need, and the extra that installs each."""


def new_app(**options: Any) -> PlainTyper:
    """Make a Typer app with plain help and plain tracebacks."""
    return PlainTyper(**options)


def run_command(app: typer.Typer, word: str, words: Sequence[str]) -> int:
    """Run `app` with `words`, and return the exit status."""
    # `--quiet` of an earlier command does not hold for this one.
    command = typer.main.get_command(app)
    quiet_before = is_quiet()
    be_quiet(False)
    # Run it. Bad input and a missing package are one line each.
    try:
        status = command.main(list(words), prog_name=f"forebay {word}", standalone_mode=False)
    except ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context else ""
        _complain(word, f"{plain_words(error.format_message()).removesuffix('.')}{hint}")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except InputError as error:
        _complain(word, str(error))
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        _complain(word, f"{package} is not installed: pip install 'forebay[{EXTRAS[package]}]'")
        return 2
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # Click ends the program itself
            raise error.__context__ from None
        raise
    finally:
        be_quiet(quiet_before)
    return status if isinstance(status, int) else 0


def _complain(word: str, what: str) -> None:
    """Print one line, without passwords in URLs, because stderr is often kept in logs."""
    print(f"forebay {word}: {printable_lines(without_user_info(what))}", file=sys.stderr)
