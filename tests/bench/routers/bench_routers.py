"""Every router in front of the same engines, the same traces, the same seeds: what users notice.

    make bench-routers                                        (everything; hours; goes on later)
    python tests/bench/routers/bench_routers.py --minutes 40  (the most telling runs first)
    python tests/bench/routers/bench_routers.py --show        (the tables of what is there)

One JSON line a run goes to --results, so a call goes on where the last one stopped. make
docs-figures writes the pages from it. Seeds are the outermost loop. A router that cannot be
installed or started is shown with its error. A run in which the load generator, the engines or the
machine were the bottleneck is marked invalid and left out of every figure.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / part) for part in ("support", "bench"))

from paths import RESULTS, ROOT
from routers.contenders import CONTENDERS, install_all
from routers.courses import COURSES
from routers.engines import simulated
from routers.machine import reference_ms
from routers.page import generated
from routers.peers import Missing
from routers.plan import Record, append_record, is_done, next_scale, read_records
from routers.processes import come_first, wait_calm
from routers.run import Run, measure
from routers.traffic import prepare

from forebay.traces.ground.errors import InputError

MODEL, GPU, ENGINES = "Llama-3-8B", "h200", 2
ATTEMPTS = 2  # of a run that is invalid
PATIENCE_S = 20.0  # longest wait for others to leave the machine, before each run


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--routers", nargs="+", default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--workloads", nargs="+", default=list(COURSES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5, help="0 to this less one (default 5)")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    parser.add_argument(
        "--time-scale", type=float, default=2.0, help="simulated seconds in a wall second (2)"
    )
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat")
    parser.add_argument("--results", type=Path, default=RESULTS / "bench-routers.jsonl.gz")
    parser.add_argument("--keep", type=Path, help="keep every run folder in here")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args(words)
    for option, names, known in (
        ("--routers", options.routers, list(CONTENDERS)),
        ("--workloads", options.workloads, list(COURSES)),
    ):
        for name in names:
            if name not in known:
                parser.error(f"{option}: {name!r} is none of {', '.join(known)}")
    if options.seeds < 1 or options.time_scale <= 0:
        parser.error("--seeds 1 or more, --time-scale above 0")
    return options


def run_all(options: argparse.Namespace) -> None:
    """Play every run that is asked for and not there yet, until the time is up."""
    until = time.monotonic() + options.minutes * 60
    versions, missing = install_all(options.routers)
    records = read_records(options.results)
    if why := come_first():
        print(why, file=sys.stderr)
    failed: set[tuple[str, str]] = set()  # not tried again by this call, with any seed
    # Each run once, then again where it was invalid.
    plan = ATTEMPTS * [
        (seed, workload) for seed in range(options.seeds) for workload in options.workloads
    ]
    for seed, workload in plan:
        course = COURSES[workload]
        traffic = prepare(course, seed, MODEL, GPU, ENGINES)
        for router in options.routers:
            record: Record = {
                "engines": "sim", "count": ENGINES, "model": MODEL, "endpoint": options.endpoint,
                "workload": workload, "router": router, "seed": seed,
                "version": versions.get(router, "none"), "trace": traffic.sha256,
            }  # fmt: skip
            if (workload, router) in failed or is_done(record, records, ATTEMPTS):
                continue
            if time.monotonic() >= until:
                print("time is up; call it again to go on", file=sys.stderr)
                return
            scale = next_scale(min(options.time_scale, course.time_scale), record, records)
            fleet = simulated(ENGINES, MODEL, GPU, scale, course.chunk)
            record |= {
                "time_scale": scale, "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "commit": _commit(), "behind": fleet.version, "engine_command": fleet.command,
                "slo": traffic.slo, "ideal_hit_ratio": round(traffic.ideal_hit_ratio, 4),
                "load": course.load, "capacity_per_s": traffic.capacity_per_s,
                "machine": _machine(),
            }  # fmt: skip
            if router in missing:
                record |= {"error": missing[router]}
            else:
                wait_calm(min(PATIENCE_S, until - time.monotonic()))
                run = Run(CONTENDERS[router], traffic, seed, fleet, options.endpoint)
                record |= measure(run, _folder(options.keep, workload, seed, router))
            if "error" in record:
                failed.add((workload, router))
            append_record(options.results, record)
            records.append(record)
            print(_line(record), file=sys.stderr, flush=True)


def _folder(keep: Path | None, workload: str, seed: int, router: str) -> Path | None:
    if keep is None:
        return None
    return keep / f"{workload}-{seed}".replace(",", "").replace(" ", "-") / router.replace(" ", "-")


def _machine() -> Record:
    return {
        "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "reference_ms": round(reference_ms(), 1),
    }  # fmt: skip


def _commit() -> str:
    """Return the commit of this repository, which is needed to repeat the run."""
    described = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return described.stdout.strip() or "not a checkout"


def _line(record: Record) -> str:
    head = f"{record['workload']}, {record['router']}, seed {record['seed']}:"
    if "error" in record:
        return f"{head} {record['error']}"
    figures = record["figures"]
    tails = ", ".join(f"{name} p99 {of['p99']} ms" for name, of in figures["ttft"].items())
    why = "" if record["verdict"] == "valid" else f"; {record['why']}"
    return (
        f"{head} {record['verdict']}, {tails}, attained {figures['attainment']:.3f}; machine "
        f"{record['machine_busy']:.0%}, late steps {record['late_steps']:.1%}, "
        f"{record['wall_s']:.0f} s{why}"
    )


def main() -> int:
    options = parse()
    try:
        if not options.show:
            run_all(options)
        print(generated(read_records(options.results)))
    except (InputError, Missing) as error:
        print(f"bench-routers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; call it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
