"""Every router in front of the same engines, the same traces, the same seeds: what users notice.

    make bench-routers                                   (everything, resumable; hours)
    python tests/bench/routers/bench_routers.py --minutes 40   (the most telling runs first)
    python tests/bench/routers/bench_routers.py --show         (the table of what is there)

One JSON line a run goes to --results, so a call goes on where the last one stopped; the page and
the table are made from whatever is there. Seeds are the outermost loop. A router that cannot be
installed or started is shown with its error; a run in which the load generator, the engines or the
machine were the bottleneck is marked invalid and left out of every figure.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
RESULTS = ROOT / "tests" / "bench" / "results"
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "support")]

from arena_contenders import CONTENDERS, install_all  # noqa: E402
from arena_courses import COURSES, CPU_COURSES  # noqa: E402
from arena_engines import SIMULATED, VLLM_CPU, Fleet, simulated, vllm_cpu  # noqa: E402
from arena_page import page, write_docs  # noqa: E402
from arena_plan import (  # noqa: E402
    Cell,
    Record,
    append_record,
    cells,
    in_order,
    is_done,
    next_scale,
    read_records,
)
from arena_processes import come_first, wait_calm  # noqa: E402
from arena_run import Run, capacity_per_s, measure  # noqa: E402
from arena_tables import tables  # noqa: E402
from arena_traffic import Course, Traffic, prepare, prepare_real  # noqa: E402
from machine import reference_ms  # noqa: E402
from peers import Missing  # noqa: E402

from forebay.traces.errors import InputError  # noqa: E402
from forebay.traces.schema import TraceRequest  # noqa: E402

MODEL, GPU = "Llama-3-8B", "h200"
CONTEXT = 16_384  # of the model on the CPU
VLLM_FLAGS = (
    "--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """The options."""

    engines: str
    count: int
    endpoint: str
    time_scale: float
    data: Path
    results: Path
    keep: Path | None
    minutes: float
    patience_s: float
    attempts: int
    routers: tuple[str, ...]
    workloads: tuple[str, ...]
    seeds: tuple[int, ...]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engines", choices=[SIMULATED, VLLM_CPU], default=SIMULATED)
    parser.add_argument("--count", type=int, default=2, help="engines (default 2)")
    parser.add_argument("--routers", nargs="+", default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--core", action="store_true", help="the most telling of those only")
    parser.add_argument("--seeds", type=int, default=5, help="0 to this less one (default 5)")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after so many")
    parser.add_argument(
        "--patience", type=float, default=20.0, metavar="S",
        help="wait so long for others to leave the machine, before each run (20)",
    )  # fmt: skip
    parser.add_argument("--attempts", type=int, default=2, help="of a run that is invalid (2)")
    parser.add_argument(
        "--time-scale", type=float, default=2.0, help="simulated seconds in a wall second (2)"
    )
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--results", type=Path, default=RESULTS / "bench-routers.jsonl.gz")
    parser.add_argument("--keep", type=Path, help="keep every run folder in here")
    parser.add_argument("--page", type=Path, help="write the HTML page here")
    parser.add_argument(
        "--write-docs", action="store_true", help="also make docs/benchmarks/bench-routers.md anew"
    )
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--list", action="store_true", help="names of routers and workloads")
    given = parser.parse_args(words)
    courses = COURSES if given.engines == SIMULATED else CPU_COURSES
    given.workloads = given.workloads or list(courses)
    for option, names, known in (
        ("--routers", given.routers, CONTENDERS),
        ("--workloads", given.workloads, courses),
    ):
        for name in names:
            if name not in known:
                parser.error(f"{option}: {name!r} is none of {', '.join(known)}")
    if given.core:
        given.routers = [name for name in given.routers if CONTENDERS[name].core]
        given.workloads = [name for name in given.workloads if courses[name].core]
    if given.seeds < 1 or given.attempts < 1 or given.count < 2 or given.time_scale <= 0:
        parser.error("--seeds and --attempts 1 or more, --count 2 or more, --time-scale above 0")
    return given


class _Fleets:
    """Engines by their flag. Real ones are started when first asked for, and kept."""

    def __init__(self, settings: Settings, folder: Path, stack: ExitStack) -> None:
        self._settings = settings
        self._folder = folder
        self._stack = stack
        self._real: dict[int, Fleet] = {}

    def of(self, chunk: int = 0, scale: float | None = None) -> Fleet:
        """The fleet for `Course.chunk`; `scale`: time scale of simulated engines."""
        count = self._settings.count
        if self._settings.engines == SIMULATED:
            return simulated(count, MODEL, GPU, scale or self._settings.time_scale, chunk)
        if chunk not in self._real:
            real = vllm_cpu(count, self._folder, VLLM_FLAGS, chunk)
            self._real[chunk] = self._stack.enter_context(real)
        return self._real[chunk]


def run_all(settings: Settings) -> None:
    """Everything that is asked for and not there yet, until the time is up."""
    until = time.monotonic() + settings.minutes * 60
    courses = COURSES if settings.engines == SIMULATED else CPU_COURSES
    versions, missing = install_all(settings.routers)
    wanted = cells(
        {name: courses[name].core for name in settings.workloads},
        {name: (CONTENDERS[name].core, CONTENDERS[name].slow) for name in settings.routers},
    )
    records = read_records(settings.results)
    with (
        tempfile.TemporaryDirectory(prefix="forebay-fleet-") as folder,
        ExitStack() as stack,
    ):
        fleets = _Fleets(settings, Path(folder), stack)
        fleet = fleets.of()
        if why := come_first():
            print(why, file=sys.stderr)
        traffics = _Traffics(settings, fleet)
        failed: set[Cell] = set()  # not tried again by this call, with whatever seed
        # Once for all, then again for those that were invalid.
        for seed, cell in settings.attempts * in_order(wanted, settings.seeds):
            course = courses[cell.workload]
            record: Record = {
                "engines": fleet.kind, "count": fleet.count, "model": fleet.model,
                "endpoint": settings.endpoint, "workload": cell.workload, "router": cell.router,
                "seed": seed, "version": versions.get(cell.router, "none"),
            }  # fmt: skip
            if cell in failed or cell.workload in traffics.skipped:
                continue
            traffic = traffics.get(course, seed)
            if traffic is None:
                continue
            record["trace"] = traffic.sha256
            if is_done(record, records, settings.attempts):
                continue
            if time.monotonic() >= until:
                print("time is up; call it again to go on", file=sys.stderr)
                return
            scale = fleet.time_scale
            if fleet.kind == SIMULATED:
                most = min(course.time_scale, CONTENDERS[cell.router].time_scale)
                scale = next_scale(min(scale, most), record, records)
            behind = fleets.of(course.chunk, scale)
            record |= {"time_scale": scale, **_circumstances(behind, traffic, course)}
            if cell.router in missing:
                record |= {"error": missing[cell.router]}
            else:
                if fleet.simulated:
                    wait_calm(min(settings.patience_s, until - time.monotonic()))
                asked = Run(CONTENDERS[cell.router], traffic, seed, behind, settings.endpoint)
                record |= measure(asked, _folder(settings, cell.workload, cell.router, seed))
            if "error" in record:
                failed.add(cell)
            append_record(settings.results, record)
            records.append(record)
            print(_line(record), file=sys.stderr, flush=True)


class _Traffics:
    """Traffic by course and seed, the last one kept: seeds and workloads are the outer loops."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self.skipped: dict[str, str] = {}
        self._settings = settings
        self._fleet = fleet
        self._made: dict[tuple[str, int], Traffic] = {}

    def get(self, course: Course, seed: int) -> Traffic | None:
        key = (course.traffic_name, seed)
        if key not in self._made:
            self._made.clear()
            data, count = self._settings.data, self._settings.count
            try:
                if self._fleet.kind == SIMULATED:
                    self._made[key] = prepare(course, seed, data, MODEL, GPU, count)
                else:
                    self._made[key] = prepare_real(
                        course, seed, data, CONTEXT, lambda rows: self._capacity(course, seed, rows)
                    )
            except InputError as error:
                self.skipped[course.name] = str(error)
                print(f"{course.name}: skipped: {error}", file=sys.stderr)
                return None
        return self._made[key]

    def _capacity(self, course: Course, seed: int, rows: Sequence[TraceRequest]) -> float:
        """Asked for once: another answer would make another trace, comparable with nothing."""
        results = self._settings.results
        file = results.with_name(f"{results.name.partition('.')[0]}.capacity.json")
        known: dict[str, float] = orjson.loads(file.read_bytes()) if file.exists() else {}
        name = f"{self._fleet.kind} {self._fleet.count} {course.traffic_name} {seed}"
        if name not in known:
            known[name] = capacity_per_s(self._fleet, rows, seed, self._settings.endpoint)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(orjson.dumps(known, option=orjson.OPT_INDENT_2) + b"\n")
        return known[name]


def _folder(settings: Settings, workload: str, router: str, seed: int) -> Path | None:
    if settings.keep is None:
        return None
    return (
        settings.keep
        / f"{workload}-{seed}".replace(",", "").replace(" ", "-")
        / router.replace(" ", "-")
    )


def _circumstances(fleet: Fleet, traffic: Traffic, course: Course) -> Record:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "behind": fleet.version,
        "engine_command": fleet.command,
        "slo": traffic.slo,
        "trace": traffic.sha256,
        "ideal_hit_ratio": round(traffic.ideal_hit_ratio, 4),
        "load": course.load,
        "capacity_per_s": traffic.capacity_per_s,
        "machine": {
            "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(), "reference_ms": round(reference_ms(), 1),
        },
    }  # fmt: skip


def _commit() -> str:
    """The commit of this repository, needed to repeat the run."""
    told = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return told.stdout.strip() or "not a checkout"


def _line(record: Record) -> str:
    head = f"{record['workload']}, {record['router']}, seed {record['seed']}:"
    if "error" in record:
        return f"{head} {record['error']}"
    figures = record["figures"]
    tails = ", ".join(f"{name} p99 {_s(of['p99'])}" for name, of in figures["ttft"].items())
    return (
        f"{head} {record['verdict']}, {tails}, goodput {figures['goodput_per_s']:.2f}/s, attained "
        f"{figures['attainment']:.3f}, hits {figures['hit_ratio'] or 0:.2f}; machine "
        f"{record['machine_busy']:.0%}, late steps {record['late_steps'] or 0:.1%}, router "
        f"{record['router_cores']:.2f} cores, {record['wall_s']:.0f} s"
        + ("" if record["verdict"] == "valid" else f"; {record['why']}")
    )


def _s(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds / 1e3:.2f} s"


def main() -> int:
    given = parse()
    if given.list:
        for name, contender in CONTENDERS.items():
            print(f"{name}: {contender.note}")
        for name, course in (COURSES if given.engines == SIMULATED else CPU_COURSES).items():
            print(f"{name}: {course.about}")
        return 0
    settings = Settings(
        given.engines, given.count, given.endpoint, given.time_scale, given.data, given.results,
        given.keep, given.minutes, given.patience, given.attempts, tuple(given.routers),
        tuple(given.workloads), tuple(range(given.seeds)),
    )  # fmt: skip
    try:
        if not given.show:
            run_all(settings)
        records = read_records(settings.results)
        print(tables(records))
        if given.page is not None:
            given.page.write_text(page(records), encoding="utf-8")
        if given.write_docs:
            write_docs(BENCHMARKS / "bench-routers.md", records)
    except (InputError, Missing) as error:
        print(f"bench-routers: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; call it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
