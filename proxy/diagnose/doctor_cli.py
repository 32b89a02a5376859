"""`forebay doctor`: find the faults of a running proxy and its backends."""

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.proxy.diagnose.admin_client import (
    DEFAULT_ADMIN,
    AdminUrl,
    Unreachable,
    ask,
    ask_json,
    cleaned_json,
)
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.command_line.options import AsJson, a_time
from forebay.traces.ground.command_line.plugins import from_lab
from forebay.traces.ground.command_line.quantities import long_time

if TYPE_CHECKING:
    from forebay.proxy.diagnose.doctor.finding import Finding
    from forebay.proxy.diagnose.scene import Scene

EXAMPLE = """Say what is wrong with a running proxy and its backends.

Reads /status, /metrics and /requests of the admin port, and asks every backend through the
proxy for its version, its models and its metrics. One line for each finding: what, the
figures, and the remedy, the cause first. Findings are about the last 5 minutes, or --since.
What was wrong before, or is no fault, is information. Where the proxy captures its traffic
and a server lacks --long-prefill-token-threshold, the last requests are played with it, in
some seconds: what would have been is information, too. Exit status 0: nothing found;
1: something found; 2: the proxy does not answer.

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
    since: Annotated[
        float, a_time("how far back to look: at most 1h, or the start of the proxy", "--since")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    from forebay.proxy.diagnose.checks import CHECKS, examine

    # A finding of the window is not repeated as an earlier finding.
    whole = ask_all(admin, since)
    scene = whole.recent()
    findings, checked = examine(scene), list(CHECKS)
    now = {finding.check for finding in findings}
    earlier = [finding for finding in examine(whole) if finding.check not in now]
    if config is not None:
        from forebay.proxy.diagnose.config_file import CHECK, examine_file

        findings += examine_file(config, os.environ, scene)
        checked.append(CHECK)
    findings += _otherwise(admin, since, config, scene)
    # Print the findings, then what was checked.
    if as_json:
        data = {
            "checked": checked,
            "since_s": since,
            "findings": [asdict(finding) for finding in findings],
            "earlier": [asdict(finding) for finding in earlier],
            "prefix_index": {
                name: backend["prefix_index"]["paths"] for name, backend in scene.backends().items()
            },
        }
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        show(findings)
        for finding in earlier:
            talk(f"INFO     before the last {long_time(since)}: {finding.text}.")
        talk(_summary(scene, findings, checked))
        for line in exact_paths(scene):
            talk(textwrap.fill(line, WIDTH))
    if _faults(findings):
        raise typer.Exit(1)


def _otherwise(admin: str, since_s: float, config: Path | None, scene: "Scene") -> "list[Finding]":
    """Play the captured traffic with the flag and the scheduler class, if a backend has neither.

    The lab does it, and finds nothing if neither is better.
    """
    from forebay.proxy.diagnose.doctor.finding import Finding

    lacks = [
        name
        for name, backend in scene.backends().items()
        if not backend.get("long_prefill_token_threshold") and backend.get("scheduler") != "forebay"
    ]
    if not lacks or not scene.status.get("capture"):
        return []
    gain = from_lab("largest_gain")(admin, since_s, config)
    return [] if gain is None else [Finding("what would have been", "info", *gain)]


def ask_all(admin: str, since_s: float) -> "Scene":
    """Read everything from the admin port, and the metrics of `since_s` ago. Raises InputError."""
    from forebay.proxy.diagnose.scene import Scene, samples_of

    before = ask_json(admin, "/status", "ready")
    try:
        facts = cleaned_json(ask(admin, "/backends"))
        samples = samples_of(ask(admin, "/metrics").decode())
        then = samples_of(ask(admin, f"/metrics?ago={since_s:.0f}").decode())
        outcomes = ask_json(admin, f"/requests?since_s={since_s:.0f}", "outcomes")["outcomes"]
    except ValueError:
        raise Unreachable(
            f"--admin {admin}: not the admin port of a Forebay of this version"
        ) from None
    status = ask_json(admin, "/status", "ready")
    return Scene(status, facts, samples, before, then, outcomes=outcomes)


def show(findings: "Sequence[Finding]") -> None:
    """Print each finding with its remedy in one line, or in a terminal as a paragraph."""
    for finding in findings:
        line = f"{finding.severity.upper():<8} {finding.text}. Remedy: {finding.remedy}."
        if sys.stdout.isatty():
            line = textwrap.fill(line, WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False)
        print(line)


def exact_paths(scene: "Scene") -> list[str]:
    """Return the mode of the prefix index for each path, a line for all backends that agree."""
    names: dict[str, list[str]] = {}
    for name, backend in scene.backends().items():
        by_mode: dict[str, list[str]] = {}
        for path, mode in backend["prefix_index"]["paths"].items():
            by_mode.setdefault(mode, []).append(path)
        text = "; ".join(f"{mode} for {', '.join(paths)}" for mode, paths in by_mode.items())
        names.setdefault(text, []).append(name)
    return [f"Prefix index of {', '.join(of)}: {text}." for text, of in names.items()]


def _faults(findings: "Sequence[Finding]") -> int:
    return sum(finding.severity != "info" for finding in findings)


def _summary(scene: "Scene", findings: "Sequence[Finding]", checked: Sequence[str]) -> str:
    backends = len(scene.backends())
    faults = _faults(findings)
    result = f"{faults} found" if faults else "nothing found"
    hosts = f"{backends} backend{'s' if backends != 1 else ''}"
    return f"Checked {hosts} with {len(checked)} checks (--json lists them). {result.capitalize()}."
