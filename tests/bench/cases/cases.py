"""Play all cases at all loads, and keep each result at once (make cases).

    python tests/bench/cases/cases.py                    all missing cells of all policies
    python tests/bench/cases/cases.py --only forebay     one policy, or those that begin with this
    python tests/bench/cases/cases.py --case b2b-saas --load 0.95

results/cases.json has the figures of each cell, policy and seed, with the commit that played them.
Other routers do not depend on the policy of Forebay, so what is there of them stays. Forebay's
cells are played again when a commit has changed the policy since.
"""

import argparse
import fcntl
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from case_list import CASES
from case_traces import Pieces
from paths import RESULTS, ROOT
from play import CHUNK, FOREBAY, POLICIES, SPLIT, Figures, figures, play

from forebay.replay.sim.scenario import DIRECT

TABLE = RESULTS / "cases.json"
VENDOR = "vendor"  # the load of the vendor's own run
NAMES = ("0.95", "1.5", "0.6", VENDOR)  # of loads; the most telling first
SEEDS = 2
BEHIND = 10.0  # points in time
POLICY_FILES = ("proxy/core", "proxy/config/schema.py")
Table = dict[str, dict[str, Any]]
"""By cell and policy: for each seed the commit, and the values of `Figures` in their order."""


@dataclass(frozen=True, slots=True)
class Cell:
    case: str
    load: str
    flag: bool

    @property
    def name(self) -> str:
        return f"{self.case} {self.load}" + " flag" * self.flag

    @property
    def pieces(self) -> Pieces:
        case = CASES[self.case]
        if self.load == VENDOR:
            return case.vendor
        return [(case.seconds, float(self.load) * case.capacity)]


def cells() -> Iterator[Cell]:
    """Yield all cells, default flags first, near capacity and overload before other loads.

    Cases whose turns wait come last, and have default flags only.
    """
    for waits, flag in ((False, False), (False, True), (True, False)):
        for load in NAMES:
            for name, case in CASES.items():
                if case.waits == waits and (load != VENDOR or case.vendor):
                    yield Cell(name, load, flag)


def read() -> Table:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


@contextmanager
def changed() -> Iterator[Table]:
    """Read the table, and write it when the caller has changed it. One writer at a time."""
    with open(TABLE.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = read()
        yield table
        lines = (f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
        new = TABLE.with_suffix(".new")
        new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        new.rename(TABLE)


def commit(*files: str) -> str:
    """Return the last commit that changed these files, with a + if they have other changes."""

    def git(*words: str) -> str:
        told = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return told.stdout.strip()

    edited = git("status", "--porcelain", "--", *files)
    return git("log", "-1", "--format=%h", "--", *files) + "+" * bool(edited)


def missing(table: Table, policy: str, cell: Cell, seed: int, now: str) -> bool:
    """True if the result is to be played.

    A model that is far behind the best one on the first seed is not played on others.
    """
    kept = table.get(f"{cell.name} {policy}", {}).get(str(seed))
    if policy == FOREBAY:
        return kept is None or kept[0] != now or now.endswith("+")
    if kept is not None or (policy == SPLIT and CASES[cell.case].waits):
        return False
    most = max(in_time(table, cell, name) for name in POLICIES if name != FOREBAY)
    near = in_time(table, cell, policy) >= most - BEHIND
    return seed == 0 or policy in (DIRECT, SPLIT) or near


def in_time(table: Table, cell: Cell, policy: str) -> float:
    """Return the % in time on the first seed, 0 if it was not played."""
    kept = table.get(f"{cell.name} {policy}", {}).get("0")
    return float(kept[1][1]) if kept else 0.0


def rounded(found: Figures) -> list[float | None]:
    values = [value if value == value else None for value in asdict(found).values()]
    return [None if value is None else float(f"{value:.4g}") for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME", help="policies that begin with this")
    parser.add_argument("--but", default="-", metavar="NAME", help="not this policy")
    parser.add_argument("--case", help="one case")
    parser.add_argument("--load", choices=NAMES, help="one load")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--minutes", type=float, default=1e6, help="start nothing after so many")
    options = parser.parse_args()
    end_s = time.monotonic() + 60 * options.minutes
    policy_commit, all_of = commit(*POLICY_FILES), commit("proxy", "replay", "traces")
    for seed in range(options.seeds):
        for cell in cells():
            case = CASES[cell.case]
            if options.case not in (None, cell.case) or options.load not in (None, cell.load):
                continue
            for policy in POLICIES:
                wanted = policy.startswith(options.only) and policy != options.but
                if not wanted or case.missing or time.monotonic() > end_s:
                    continue
                if not missing(read(), policy, cell, seed, policy_commit):
                    continue
                found = figures(case, play(case, policy, cell.pieces, seed, flag=CHUNK * cell.flag))
                by = policy_commit if policy == FOREBAY else all_of
                with changed() as table:
                    table.setdefault(f"{cell.name} {policy}", {})[str(seed)] = [by, rounded(found)]
                print(f"{cell.name:22} {policy:18} {seed} {found.line()}", flush=True)


if __name__ == "__main__":
    main()
