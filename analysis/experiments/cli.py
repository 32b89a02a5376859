"""The command `forebay experiment`: one subcommand per study."""

from importlib import import_module

from forebay.analysis.experiments import STUDIES
from forebay.proxy.command import new_app

HELP = """Studies of one server or a whole service. Each writes results.json,
results.csv, results.md and plot.svg.

The target is the URL of an OpenAI-compatible server, or `sim:MODEL@GPU` for
simulated engines in virtual time.

Example:  forebay experiment prefill --target sim:phi-3-mini@h200-nvl --out runs/prefill
"""

app = new_app(help=HELP)
for _name, _module in STUDIES.items():
    _study = import_module(_module)
    app.command(_name, help=_study.HELP)(_study.command)
