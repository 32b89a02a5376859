"""Search the highest load of Forebay and of models of other routers, in virtual time.

    python tests/bench/policies.py                   # all workloads and policies, default flags
    python tests/bench/policies.py "chat beside" --chunk 2048 --seeds 3

Two simulated engines (Llama-3-8B, H200), the same requests for all policies. The models
(`replay/sim/routers/models.py`) choose as the named routers do by their documentation and source;
they are not these routers. Records go to --results, from which make docs-figures writes
docs/benchmarks/bench-policies.md. Workloads of public traces need --data (see CONTRIBUTING.md).
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from arena_highest import HIGHEST_LOADS, PLAYED_POLICIES, Search, add_records, search_all
from arena_highest_page import shown_load
from paths import RESULTS, SHARED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loads", nargs="*", help="workloads whose name has this in it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--policy", action="append", help="only these [default: all]")
    parser.add_argument("--chunk", type=int, default=0, metavar="TOKENS",
        help="of the engines: --long-prefill-token-threshold [default: 0, off]")  # fmt: skip
    parser.add_argument("--results", type=Path, default=RESULTS / "bench-policies.jsonl.gz")
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    parts = options.loads or [""]
    loads = [load for load in HIGHEST_LOADS if any(part in load.name for part in parts)]
    if not loads:
        names = ", ".join(load.name for load in HIGHEST_LOADS)
        parser.error(f"no workload has that in its name; {names}")
    there = [load for load in loads if not load.data or (options.data / "traces").is_dir()]
    if left_out := [load.name for load in loads if load not in there]:
        print(f"left out, there is no {options.data}: {', '.join(left_out)}")
    searches = [
        Search(load.name, policy, options.chunk, options.seeds, options.data)
        for load in there
        for policy in options.policy or PLAYED_POLICIES
    ]
    for record in search_all(searches, options.jobs):
        add_records(options.results, [record])
        print(f"{record['workload']}, {record['policy']}: {shown_load(record)}", flush=True)


if __name__ == "__main__":
    main()
