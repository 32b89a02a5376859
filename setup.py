"""With FOREBAY_COMPILE=1 the policy and the simulator are compiled (mypyc) from the same source.

Everything else about the package stands in pyproject.toml. `make install` sets it where there is a
C compiler, and `make compiled` is for work on the source.
"""

import os
import re
import sys
import tomllib
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

FOLDERS = ("analysis", "proxy", "replay", "traces")
CORE = ".typing/forebay/proxy/core"
SIM = ".typing/forebay/replay/sim"
# Modules of the simulator that stay interpreted: commands, reports, what runs once per simulation.
INTERPRETED_SIM = (
    *("capacity", "cli", "closed_loop", "run_folder", "scenario", "summary", "sweep"),
    *("table", "workload", "engine/stepping", "routers/possible"),
)


def compiled_modules(root: str = ".") -> list[str]:
    """Paths of all modules to compile: the core, most of the simulator, the step-time model.

    They go through the links in .typing/forebay, which are made where an sdist left them out.
    """
    for folder in FOLDERS:
        link = Path(root, ".typing", "forebay", folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(Path("..", "..", folder))
    core = sorted(glob(f"{CORE}/**/*.py", root_dir=root, recursive=True))
    sim = sorted(glob(f"{SIM}/**/*.py", root_dir=root, recursive=True))
    skipped = {f"{SIM}/{name}.py" for name in INTERPRETED_SIM}
    modules = [*core, *(path for path in sim if path not in skipped)]
    timing = ".typing/forebay/replay/engine/timing"
    modules += [f"{timing}/{name}.py" for name in ("api_server", "step_time")]
    return [path for path in modules if not path.endswith("__init__.py")]


# All is one library that shares no C symbol with others. Telling the compiler so lets it inline
# across modules and call without the procedure linkage table. gcc and clang know these.
INLINING = ["-fvisibility=hidden", "-fno-semantic-interposition", "-fno-plt"]


COMPILES = os.environ.get("FOREBAY_COMPILE") == "1"


def extensions() -> list[Extension]:
    # For the two commands pip wants the names of packages alone, perhaps before mypyc is there.
    if not COMPILES or not {"egg_info", "dist_info"}.isdisjoint(sys.argv):
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


def build_requirements() -> list[str]:
    """Return what compiling needs: mypyc, and all that the source imports, for its types."""
    if not COMPILES:
        return []
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return ["mypy>=1.18", "types-PyYAML", *project["dependencies"]]


def description() -> str:
    """README.md. PyPI has no files beside it: links lead to FOREBAY_REPOSITORY, if that is set."""
    text = Path("README.md").read_text(encoding="utf-8")
    pages = os.environ.get("FOREBAY_REPOSITORY")
    if not pages:
        return text
    text = re.sub(r"\]\((?!https?:|#)", f"]({pages}/", text)
    return re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{pages.replace("/blob/", "/raw/")}/', text)


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        setup_requires=build_requirements(),
        long_description=description(),
        long_description_content_type="text/markdown",
    )
