"""With FOREBAY_COMPILE=1 the policy and the simulator are compiled (mypyc) from the same source.

Everything else about the package stands in pyproject.toml. `make compiled` is the short way.
"""

import os
import sys
from glob import glob

from setuptools import Extension, setup

CORE = ".typing/forebay/proxy/core"
SIM = ".typing/forebay/replay/sim"
# Modules of the simulator that stay interpreted: commands, reports, what runs once per simulation.
INTERPRETED_SIM = (
    *("bench", "capacity", "cli", "clock", "closed_loop", "hindsight", "prefix_bench"),
    *("possible", "run_folder", "scenario", "stepping", "summary", "sweep", "table", "workload"),
)


def compiled_modules(root: str = ".") -> list[str]:
    """Paths of all modules to compile: the core, most of the simulator, the step-time model."""
    core = sorted(glob(f"{CORE}/**/*.py", root_dir=root, recursive=True))
    sim = sorted(glob(f"{SIM}/*.py", root_dir=root))
    skipped = {f"{SIM}/{name}.py" for name in INTERPRETED_SIM}
    modules = [*core, *(path for path in sim if path not in skipped)]
    modules += [f".typing/forebay/replay/engine/{name}.py" for name in ("api_server", "step_time")]
    return [path for path in modules if not path.endswith("__init__.py")]


# All is one library that shares no C symbol with others. Telling the compiler so lets it inline
# across modules and call without the procedure linkage table. gcc and clang know these.
INLINING = ["-fvisibility=hidden", "-fno-semantic-interposition", "-fno-plt"]


def extensions() -> list[Extension]:
    if os.environ.get("FOREBAY_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    # .typing/forebay holds links to the folders, so that mypyc finds the modules by their names.
    built = mypycify(
        compiled_modules(),
        opt_level="3",
        group_name="forebay",
    )
    if sys.platform != "win32":
        for extension in built:
            extension.extra_compile_args += INLINING
    return built


if __name__ == "__main__":
    setup(ext_modules=extensions())
