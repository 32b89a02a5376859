"""The house does not grow unseen: every figure is at most the one in weight.json.

A figure that fell is written down by `pytest tests/test_weight.py --write`. A figure that has to
rise is raised by hand in weight.json, and the commit says why.
"""

import json

import pytest
from weight import FILE, close, weights


@pytest.mark.timeout(600)  # it parses all modules and starts a proxy, on a machine that may be busy
def test_no_figure_rises(pytestconfig: pytest.Config) -> None:
    weight = json.loads(FILE.read_text(encoding="utf-8"))
    limits, counts = weight["figures"], weights()
    if pytestconfig.getoption("write"):
        limits = {name: min(size, limits.get(name, size)) for name, size in counts.items()}
        FILE.write_text(json.dumps(weight | {"figures": limits}, indent=1) + "\n", "utf-8")
    assert counts.keys() == limits.keys(), "a figure came or went: write it down with --write"
    risen = {name: (limits[name], size) for name, size in counts.items() if size > limits[name]}
    assert not risen, {name: full for name, full in close().items() if name in str(risen)}
