"""The word `forebay experiment`: one subcommand a study."""

from importlib import import_module

from forebay.analysis.experiments import STUDIES
from forebay.proxy.command import new_app

HELP = """Studies of a server or a service: each asks a few set questions, and
leaves results.json, results.csv and plot.svg.

The target is an OpenAI server by URL, or `sim:MODEL@GPU`, simulated engines
in virtual time.

Example:  forebay experiment prefill --target sim:phi-3-mini@h200-nvl --out runs/prefill
"""

app = new_app(help=HELP)
for _name, _module in STUDIES.items():
    _study = import_module(_module)
    app.command(_name, help=_study.HELP)(_study.command)
