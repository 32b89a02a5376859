"""With FOREBAY_COMPILE=1 the policy and the simulator are compiled (mypyc) from the same source.

Everything else about the package stands in pyproject.toml. `make compiled` is the short way.
"""

import os
import sys

from setuptools import Extension, setup

COMPILED = (
    *("admission", "ahead", "backend", "blocked", "cache", "candidates", "chains", "chunks"),
    *("concurrency", "cost", "dispatch", "explain", "fairness", "flight", "held", "hindsight"),
    *("kv", "lanes", "line", "meanwhile", "model", "observation", "others", "outlook", "outputs"),
    *("partition", "policies", "prefix", "prefix_error", "queueing", "queues", "quota", "receipt"),
    *("recent", "rendezvous", "returns", "routing", "shaper", "shares", "sharing", "spending"),
    *("turns",),
)
COMPILED_SIM = (
    *("all_knowing", "block_runs", "cohort", "fleet", "in_turn", "peers", "planning"),
    *("request", "runs", "skipping", "stalls"),
)
# All is one library that shares no C symbol with others. Telling the compiler so lets it inline
# across modules and call without the procedure linkage table. gcc and clang know these.
INLINING = ["-fvisibility=hidden", "-fno-semantic-interposition", "-fno-plt"]


def extensions() -> list[Extension]:
    if os.environ.get("FOREBAY_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    # .typing/forebay holds links to the folders, so that mypyc finds the modules by their names.
    built = mypycify(
        [
            *(f".typing/forebay/proxy/core/{name}.py" for name in COMPILED),
            *(f".typing/forebay/replay/sim/{name}.py" for name in COMPILED_SIM),
            ".typing/forebay/replay/engine/step_time.py",
        ],
        opt_level="3",
        group_name="forebay",
    )
    if sys.platform != "win32":
        for extension in built:
            extension.extra_compile_args += INLINING
    return built


setup(ext_modules=extensions())
