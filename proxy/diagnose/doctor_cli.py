"""`forebay doctor`: what is wrong with a running proxy and its backends."""

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.proxy.command import new_app
from forebay.proxy.diagnose.admin_client import (
    DEFAULT_ADMIN,
    AdminUrl,
    Unreachable,
    ask,
    ask_json,
    cleaned_json,
)
from forebay.traces.command_line.messages import talk

if TYPE_CHECKING:
    from forebay.proxy.diagnose.doctor.finding import Finding
    from forebay.proxy.diagnose.scene import Scene

EXAMPLE = """Say what is wrong with a running proxy and its backends.

Reads /status and /metrics of the admin port, and asks every backend through the proxy for
its version, its models and its metrics. One line for each finding: what, the figures, and
the remedy. Exit status 0: nothing found; 1: something found; 2: the proxy does not answer.

Example:

  forebay doctor --admin http://127.0.0.1:9090 --config forebay.yaml
"""
WIDTH = 80

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def doctor(
    admin: AdminUrl = DEFAULT_ADMIN,
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="also check this file, what it names, and whether it is in force",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    from forebay.proxy.diagnose.checks import CHECKS, examine

    scene = ask_all(admin)
    found, checked = examine(scene), list(CHECKS)
    if config is not None:
        from forebay.proxy.diagnose.config_file import CHECK, examine_file

        found += examine_file(config, os.environ, scene)
        checked.append(CHECK)
    if as_json:
        data = {
            "checked": checked,
            "findings": [asdict(finding) for finding in found],
            "prefix_index": {
                name: backend["prefix_index"]["paths"] for name, backend in scene.backends().items()
            },
        }
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        show(found)
        talk(textwrap.fill(_summary(scene, found, checked), WIDTH))
        for line in exact_paths(scene):
            talk(textwrap.fill(line, WIDTH))
    if found:
        raise typer.Exit(1)


def ask_all(admin: str) -> "Scene":
    """Read everything from the admin port; raises InputError."""
    from forebay.proxy.diagnose.scene import Scene, samples_of

    before = ask_json(admin, "/status", "ready")
    try:
        facts = cleaned_json(ask(admin, "/backends"))
        samples = samples_of(ask(admin, "/metrics").decode())
    except ValueError:
        raise Unreachable(
            f"--admin {admin}: not the admin port of a Forebay of this version"
        ) from None
    return Scene(ask_json(admin, "/status", "ready"), facts, samples, before)


def show(findings: "Sequence[Finding]") -> None:
    """Print each finding with its remedy in one line; in a terminal as a paragraph."""
    for one in findings:
        line = f"{one.severity.upper():<8} {one.text}. Remedy: {one.remedy}."
        if sys.stdout.isatty():
            line = textwrap.fill(line, WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False)
        print(line)


def exact_paths(scene: "Scene") -> list[str]:
    """Say for which paths the prefix index is exact; one line for all equal backends."""
    names: dict[str, list[str]] = {}
    for name, backend in scene.backends().items():
        by_mode: dict[str, list[str]] = {}
        for path, mode in backend["prefix_index"]["paths"].items():
            by_mode.setdefault(mode, []).append(path)
        text = "; ".join(f"{mode} for {', '.join(paths)}" for mode, paths in by_mode.items())
        names.setdefault(text, []).append(name)
    return [f"Prefix index of {', '.join(of)}: {text}." for text, of in names.items()]


def _summary(scene: "Scene", found: "Sequence[Finding]", checked: Sequence[str]) -> str:
    backends = len(scene.backends())
    result = "nothing found" if not found else f"{len(found)} found"
    hosts = f"{backends} backend{'s' if backends != 1 else ''}"
    return f"Checked {hosts}: {', '.join(checked)}. {result.capitalize()}."
