"""Run studies as a user does, and read their results."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from forebay.proxy.cli import main

PHI = "sim:phi-3-mini@h200-nvl"


def study(name: str, out: Path, *words: str, target: str = PHI) -> dict[str, Any]:
    """Return the results of a study of `target`, after a look at its plot."""
    assert main(["experiment", name, "--target", target, "--out", str(out), *words]) == 0
    assert ElementTree.fromstring((out / "plot.svg").read_text(encoding="utf-8")) is not None
    results: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return results
