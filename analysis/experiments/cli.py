"""The command `forebay experiment`: one subcommand per study."""

import inspect
from importlib import import_module

from forebay.analysis.experiments import STUDIES
from forebay.analysis.experiments.study import command
from forebay.traces.ground.command_line.command import new_app

HELP = """Studies of one server or a whole service. Each writes results.json,
results.csv, results.md and plot.svg (with the extra `png` also plot.png).

The target is the URL of an OpenAI-compatible server, or `sim:MODEL@GPU` for
simulated engines in virtual time.

Example:  forebay experiment prefill --target sim:phi-3-mini@h200-nvl --out runs/prefill
"""

app = new_app(help=HELP)
for _place in STUDIES:
    _module, _kind = _place.split(":")
    _study = getattr(import_module(f"forebay.analysis.experiments.studies.{_module}"), _kind)
    app.command(_study.NAME, help=inspect.getdoc(_study))(command(_study))
