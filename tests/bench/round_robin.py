"""Repeat the published measurements of the proxy against round-robin.

    make bench
    python tests/bench/round_robin.py documents --seeds 3 --out runs/bench

Each measurement runs once per seed on the same simulated engines. The table shows the median and
the range. Load is relative to capacity: the requests per second that the engines complete when
the whole trace is queued from the start (`replay/sim/capacity.py`). So 80 % and 2x mean the same
for every trace.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from forebay.analysis.demo.processes import ServerFailed
from forebay.traces.errors import InputError
from forebay.traces.schema import TraceRequest

if TYPE_CHECKING:
    from forebay.analysis.runs.run import RunData


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement.

    Attributes:
        traffic: makes the requests of a seed.
        load: offered load as a multiple of capacity.
        show: picks the figures to print from a run.
        simulated: repeat both sides in virtual time, for comparison.
    """

    name: str
    question: str
    traffic: Callable[[int], list[TraceRequest]]
    load: float
    show: Callable[["RunData"], dict[str, float | None]]
    simulated: bool = False


def _mooncake(path: Path) -> Callable[[int], list[TraceRequest]]:
    def traffic(seed: int) -> list[TraceRequest]:
        from forebay.traces.formats import open_trace

        if not path.exists():
            raise InputError(f"--mooncake {path}: no such file; give mooncake_synthetic_head.jsonl")
        return [row for row in open_trace(path) if row.arrival_s < 180.0]

    return traffic


def _documents(questions: int) -> Callable[[int], list[TraceRequest]]:
    def traffic(seed: int) -> list[TraceRequest]:
        from forebay.traces.synth.chat_beside_documents import (
            ChatBesideDocuments,
            chat_beside_documents,
        )

        spec = ChatBesideDocuments(
            chat_rate_per_s=4.0,
            document_rate_per_s=0.15,
            questions=questions,
            duration_s=360.0,
            seed=seed,
        )
        return list(chat_beside_documents(spec))

    return traffic


def _hits(run: "RunData") -> dict[str, float | None]:
    tokens = list((run.summary.get("prompt_tokens_per_backend") or {}).values())
    balance = max(tokens) / min(tokens) if len(tokens) > 1 and min(tokens) else None
    return {
        "hit ratio": run.number("hit_ratio"),
        "imbalance": balance,
        "document TTFT p50 s": _seconds(run, "ttft_ms", "document", "p50"),
        "rejected": _rejected(run),
    }


def _tails(run: "RunData") -> dict[str, float | None]:
    return {
        "chat TTFT p99 s": _seconds(run, "ttft_ms", "chat", "p99"),
        "chat worst stall s": _seconds(run, "stall_ms", "chat", "max"),
        "document TTFT p50 s": _seconds(run, "ttft_ms", "document", "p50"),
        "attainment": run.number("attainment"),
        "rejected": _rejected(run),
    }


def _ttfts(run: "RunData") -> dict[str, float | None]:
    figures: dict[str, float | None] = {
        f"{name} TTFT {percentile} s": _seconds(run, "ttft_ms", name, percentile)
        for name in ("all", "chat", "document")
        for percentile in ("p50", "p99")
    }
    return {**figures, "hit ratio": run.number("hit_ratio"), "rejected": _rejected(run)}


def _overload(run: "RunData") -> dict[str, float | None]:
    return {
        "goodput /s": run.number("goodput_per_s"),
        "attainment": run.number("attainment"),
        "rejected": _rejected(run),
        "with Retry-After": run.number("reject_ms", "with_retry_after"),
        "reject p50 ms": run.shown("reject_ms", "p50"),
        "reject p99 ms": run.shown("reject_ms", "p99"),
        "reject max ms (wall)": run.number("reject_ms", "max_wall"),
    }


def _seconds(run: "RunData", *keys: str) -> float | None:
    milliseconds = run.shown(*keys)
    return None if milliseconds is None else milliseconds / 1e3


def _rejected(run: "RunData") -> float:
    return float(sum((run.summary.get("rejected") or {}).values()))


def cases(mooncake: Path) -> dict[str, Measurement]:
    """The measurements by name."""
    shared, unshared = _documents(5), _documents(1)
    measurements = (
        Measurement(
            "mooncake", "a production trace: prefix cache hits and balance of the engines",
            _mooncake(mooncake), 0.8, _hits),
        Measurement(
            "documents", "chats beside 120k-token documents at 80 % load: latency of the chats",
            shared, 0.8, _tails),
        Measurement(
            "unshared", "as `documents`, but every document is asked about only once",
            unshared, 0.8, _tails),
        Measurement(
            "virtual", "as `documents`, over real sockets and in virtual time: do they agree?",
            shared, 0.8, _ttfts, simulated=True),
        Measurement(
            "overload", "twice capacity: requests within target, and how fast the rest is rejected",
            shared, 2.0, _overload),
        Measurement(
            "flood", "ten times capacity: the same figures as `overload`",
            shared, 10.0, _overload),
    )  # fmt: skip
    return {case.name: case for case in measurements}


def at_load(
    trace: Sequence[TraceRequest], load: float, model: str, gpu: str, engines: int
) -> tuple[list[TraceRequest], float]:
    """The trace with arrivals rescaled to `load` times capacity, and the capacity per second."""
    from forebay.replay.engine.config import EngineConfig
    from forebay.replay.sim.capacity import capacity_per_s

    config = EngineConfig(model=model, gpu=gpu)
    longest = config.context
    fitting = [row for row in trace if row.input_tokens + row.output_tokens < longest]
    capacity = capacity_per_s(fitting, config, engines)
    offered = len(trace) / (trace[-1].arrival_s - trace[0].arrival_s)
    speed = load * capacity / offered
    first_s = trace[0].arrival_s
    return [replace(row, arrival_s=(row.arrival_s - first_s) / speed) for row in trace], capacity


def main(words: Sequence[str]) -> int:
    """Run the named measurements, and return the exit status."""
    names = [*cases(Path()), "all"]
    parser = argparse.ArgumentParser(description="The proxy against round-robin.")
    parser.add_argument("name", choices=names)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the runs")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each measurement")
    parser.add_argument(
        "--time-scale", type=float, default=2.0, help="simulated seconds per wall second"
    )
    parser.add_argument("--model", default="Llama-3-8B", help="model of the engines")
    parser.add_argument("--gpu", default="H200", help="GPU of the engines")
    parser.add_argument(
        "--mooncake", type=Path, default=Path("synthetic_trace.jsonl"),
        help="Mooncake's trace, as `traces fetch mooncake-synthetic` writes it",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace earlier runs in --out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    try:
        return _run(parser.parse_args(words))
    except (InputError, ServerFailed) as error:
        print(f"round_robin: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1


def _run(options: argparse.Namespace) -> int:
    measurements = cases(options.mooncake)
    if options.name == "all" and not options.mooncake.exists():
        fetch = "run `forebay traces fetch mooncake-synthetic`, or name it with --mooncake"
        print(f"mooncake: skipped, no file {options.mooncake}; {fetch}", file=sys.stderr)
        del measurements["mooncake"]
    results = {}
    for case in measurements.values():
        if options.name not in (case.name, "all"):
            continue
        found = _measure(
            case, options.out, options.seeds, options.time_scale, options.model, options.gpu,
            options.force,
        )  # fmt: skip
        if found is None:
            return 130
        results[case.name] = found
        if not options.json:
            _print(case, found, options.model, options.gpu, options.time_scale)
    if options.json:
        sys.stdout.write(orjson.dumps(results, option=orjson.OPT_INDENT_2).decode() + "\n")
    return 0


def _measure(
    case: Measurement, out: Path, seeds: int, time_scale: float, model: str, gpu: str, force: bool
) -> list[dict[str, Any]] | None:
    """One entry per seed, with the figures of both sides. None if it was interrupted."""
    from forebay.analysis.demo.processes import Engines
    from forebay.analysis.demo.side_by_side import DIRECT, PROXIED, side_by_side
    from forebay.analysis.runs.load import load_run
    from forebay.replay.plan.options import ReplayOptions
    from forebay.replay.send.fast_loop import run_on_fast_loop

    fleet = Engines(model=model, gpu=gpu, time_scale=time_scale)
    fleet.check()
    results = []
    for seed in range(seeds):
        trace, capacity = at_load(case.traffic(seed), case.load, model, gpu, fleet.count)
        folder = out / f"{case.name}-{seed}"
        # A salt from the seed gives the same prompts in every repetition.
        base = ReplayOptions(
            trace=trace, targets=(), out=folder, seed=seed, salt=str(seed),
            too_long="truncate", force=force,
        )  # fmt: skip
        sides = run_on_fast_loop(
            lambda stop, trace=trace, folder=folder, base=base: side_by_side(  # type: ignore[misc]
                trace, folder, fleet, base, stop=stop
            )
        )
        # A run that was cut short would show false figures.
        if sides.proxied is None or sides.proxied.interrupted:
            return None
        results.append(
            {
                "seed": seed,
                "requests": len(trace),
                "capacity_per_s": capacity,
                "offered_per_s": case.load * capacity,
                "verdicts": [sides.direct.values["verdict"], sides.proxied.values["verdict"]],
                DIRECT: case.show(load_run(folder / DIRECT)),
                PROXIED: case.show(load_run(folder / PROXIED)),
                **(_simulated(case, trace, folder, model, gpu, force) if case.simulated else {}),
            }
        )
    return results


def _simulated(
    case: Measurement,
    trace: Sequence[TraceRequest],
    folder: Path,
    model: str,
    gpu: str,
    force: bool,
) -> dict[str, dict[str, float | None]]:
    """Run the same trace on both sides in virtual time."""
    from forebay.analysis.demo.side_by_side import DIRECT as IN_TURN
    from forebay.analysis.demo.side_by_side import PROXIED
    from forebay.analysis.runs.load import load_run
    from forebay.replay.engine.config import EngineConfig
    from forebay.replay.plan.slo import default_slos
    from forebay.replay.sim import sweep
    from forebay.replay.sim.run_folder import keep
    from forebay.replay.sim.scenario import DIRECT, Scenario
    from forebay.replay.sim.workload import SimWorkload

    shown = {}
    for side, policy in ((IN_TURN, DIRECT), (PROXIED, "warm_or_least_work")):
        scenario = Scenario(EngineConfig(model=model, gpu=gpu), policy=policy)
        slos = default_slos(scenario.buckets())
        planned = sweep.SweepCase({}, scenario, SimWorkload(trace, too_long="truncate"), slos)
        done, window_s = sweep.simulate_case(planned)
        name = f"{side} simulated"
        keep(folder / name, planned, done, sweep.describe(planned, done, window_s), force=force)
        shown[name] = case.show(load_run(folder / name))
    return shown


def _print(
    case: Measurement, results: list[dict[str, Any]], model: str, gpu: str, time_scale: float
) -> None:
    from rich.console import Console
    from rich.table import Table

    from forebay.analysis.demo.side_by_side import DIRECT

    console = Console(highlight=False)
    first = results[0]
    table = Table(title=f"{case.name}: {case.question}", title_justify="left")
    sides = [name for name, shown in first.items() if isinstance(shown, dict)]
    for column in ("", *sides):
        table.add_column(column, justify="left" if not column else "right")
    for key in first[DIRECT]:
        table.add_row(key, *(_spread([r[side][key] for r in results]) for side in sides))
    console.print(table)
    verdicts = sorted({verdict for r in results for verdict in r["verdicts"]})
    console.print(
        f"median (range) of seeds {', '.join(str(r['seed']) for r in results)}; "
        f"2 x {model} on {gpu}, simulated, time scale {time_scale:g}; {first['requests']} requests "
        f"at {first['offered_per_s']:.1f}/s = {case.load:g} x capacity; verdicts: "
        f"{', '.join(verdicts)}\n"
    )


def _spread(values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "-"
    middle = statistics.median(numbers)
    return f"{middle:.3g} ({min(numbers):.3g} to {max(numbers):.3g})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
