"""Fill the template of the page: one HTML file with its style and a small script.

The content security policy forbids every outside resource and any other script, so that a name in
a trace can never run as code. Without the script, only the values under the percentile plots are
missing.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from forebay.analysis.statistics.units import counts, durations, ratio, shares

_UNIT = re.compile(r"(?<=\d) (?=(?:m?s|/s|%)(?:\W|$))")
_TOGETHER = "\N{NO-BREAK SPACE}"  # keeps a number and its unit on one line


def render(**values: Any) -> str:
    """Return the page. Jinja2 escapes all values that are not Markup."""
    style, script = (_text(f"report.{kind}") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _template().render(
        style=Markup(style), script=Markup(script), script_sha256=digest, **values
    )


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "counts": counts,
        "durations": durations,
        "ratio": ratio,
        "shares": shares,
        "together": lambda text: _UNIT.sub(_TOGETHER, text),
    }
    return environment.from_string(_text("report.html"))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
