"""With FOREBAY_COMPILE=1 the policy and the simulator are compiled (mypyc) from the same source.

Everything else about the package stands in pyproject.toml. `make compiled` is the short way.
"""

import os

from setuptools import setup

COMPILED = (
    *(
        "admission",
        "backend",
        "candidates",
        "cost",
        "kv",
        "model",
        "others",
        "outlook",
        "partition",
    ),
    *("policies", "prefix", "queueing", "rendezvous", "routing", "shaper"),
)
COMPILED_SIM = (
    "block_runs",
    "cohort",
    "fleet",
    "planning",
    "request",
    "runs",
    "skipping",
    "stalls",
)


def extensions() -> list[object]:
    if os.environ.get("FOREBAY_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    # .typing/forebay holds links to the folders, so that mypyc finds the modules by their names.
    return mypycify(
        [
            *(f".typing/forebay/proxy/core/{name}.py" for name in COMPILED),
            *(f".typing/forebay/replay/sim/{name}.py" for name in COMPILED_SIM),
            ".typing/forebay/replay/engine/step_time.py",
        ],
        opt_level="3",
        group_name="forebay",
    )


setup(ext_modules=extensions())
