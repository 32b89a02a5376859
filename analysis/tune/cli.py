"""`forebay tune`: parse the options, search vLLM's flags, print their gains."""

import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.replay.engine.flags import EngineFlags
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json
from forebay.traces.ground.command_line.options import (
    AsJson,
    EngineGpu,
    EngineModel,
    Jobs,
    PacedTrafficOptions,
    same_named,
    takes_options,
)
from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    from forebay.analysis.tune.tune import Tuned, TuneFigures
    from forebay.replay.plan.slo import Slo
    from forebay.replay.sim.sweep import SweepCase

EXAMPLE = """Find the vLLM flags that serve a trace best.

It simulates tensor parallelism against replicas, the step budget, the long-prefill threshold, the
prefill interval, the batch, the API servers and Forebay's scheduler class, on the same GPUs. It
prints the gain of each flag and the `vllm serve` line. The search starts with the given engine
options.

Example:

  forebay tune trace.jsonl --model llama-3-8b --gpu h200 --gpus 4 --slo chat.ttft=1s,tpot=50ms
"""

app = new_app(help=EXAMPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneArguments(PacedTrafficOptions):
    """The options of `forebay tune` as they are typed."""

    gpus: Annotated[int, typer.Option(min=1, help="GPUs in all")] = 1
    policy: Annotated[
        str, typer.Option(help="routing policy in front of several servers, or direct")
    ] = "warm_or_least_work"
    model: EngineModel = "Llama-3-8B"
    gpu: EngineGpu = "H200"
    calibration: Annotated[
        Path | None, typer.Option(help="step-time constants, as `engine fit -o` writes them")
    ] = None
    requests: Annotated[int, typer.Option(min=100, help="most requests, from the first")] = 2000
    jobs: Jobs = None
    as_json: AsJson = False


@app.command(help=EXAMPLE)
@takes_options
def tune_command(arguments: TuneArguments, flags: EngineFlags) -> None:
    from forebay.analysis.tune.tune import Run, Tuner
    from forebay.replay.engine.config import EngineConfig
    from forebay.replay.parts.pool import process_pool
    from forebay.replay.plan.schedule import parse_arrivals
    from forebay.replay.plan.slo import default_slos, parse_slos
    from forebay.replay.sim.scenario import Scenario
    from forebay.replay.sim.workload import SimWorkload

    engine = EngineConfig(
        arguments.model, arguments.gpu, calibration=arguments.calibration, **flags.values()
    )
    servers, left = divmod(arguments.gpus, engine.tensor_parallel_size)
    if left:
        raise InputError(
            f"--gpus {arguments.gpus}: not a multiple of --tensor-parallel-size "
            f"{engine.tensor_parallel_size}; change one of them"
        )
    scenario = Scenario(engine, servers, arguments.policy)
    # Step times without a calibration are guesses, and the user is told so.
    for remark in scenario.constants_remarks():
        print(f"forebay tune: {remark}", file=sys.stderr)
    slos = default_slos(scenario.buckets())
    if arguments.slo is not None:
        slos = parse_slos(arguments.slo, [bucket.name for bucket in scenario.buckets()])
    arrivals = {"arrivals": parse_arrivals(arguments.arrivals)}
    whole = SimWorkload(**same_named(arguments, SimWorkload) | arrivals)
    rows = whole.source(engine.context)[: arguments.requests]
    workload = replace(whole, trace=rows, format_name=None, skip_bad=False)
    # Search the flags, with the simulations in processes that live as long as the search.
    jobs = arguments.jobs or len(os.sched_getaffinity(0))
    with process_pool(jobs) if jobs > 1 else nullcontext() as pool:
        one_after_another: Run = partial(map, summary_of)
        run = partial(pool.map, summary_of) if pool else one_after_another
        result = Tuner(scenario, workload, slos, run).tune()
    _show(result, slos, len(rows), as_json=arguments.as_json)


def summary_of(case: "SweepCase") -> dict[str, Any]:
    from forebay.replay.sim.sweep import describe, simulate_case

    return describe(case, *simulate_case(case), bounded=False)


def _show(result: "Tuned", slos: "tuple[Slo, ...]", requests: int, *, as_json: bool) -> None:
    import shlex

    from forebay.analysis.tune.tune import serve_words
    from forebay.replay.engine.limits import FOREBAY_CLASS

    # The command that starts such a server, for both forms.
    line = shlex.join(serve_words(result.engine))
    if as_json:
        print_json(
            {
                "requests": requests,
                "slos": [str(slo) for slo in slos],
                "servers": result.servers,
                "servers_before": result.servers_before,
                "start": asdict(result.start),
                "best": asdict(result.best),
                "gains": [asdict(gain) for gain in result.gains],
                "impossible": result.impossible,
                "simulated": result.simulated,
                "command": line,
            }
        )
        return
    # Print the gains first, then the flags to change.
    _print(result, slos, requests)
    print(f"\n{result.servers} server{'s' * (result.servers > 1)}, each:\n  {line}")
    if result.servers < result.servers_before:
        print(
            f"--tensor-parallel-size {result.engine.tensor_parallel_size} costs servers: you have "
            f"{result.servers_before} on these GPUs now. When one fails, more is lost."
        )
    if result.engine.scheduler_cls == FOREBAY_CLASS:
        print("In the proxy's file, give each backend scheduler: forebay.")
    if result.engine.long_prefill_token_threshold:
        print(
            "In the proxy's file, give each backend long_prefill_token_threshold: "
            f"{result.engine.long_prefill_token_threshold}."
        )


def _print(result: "Tuned", slos: "tuple[Slo, ...]", requests: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    # Each changed flag has a row with its part of the gain.
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("flag", no_wrap=True)
    for name in ("now", "best", "met\nwithout", "gain,\npoints"):
        table.add_column(name, justify="right")
    for slo in slos:
        table.add_column(f"{str(slo).partition('=')[0]}\np95 without", justify="right")
    for gain in result.gains:
        table.add_row(
            "--" + gain.flag.replace("_", "-"), str(gain.before), str(gain.value),
            f"{gain.without.attainment:.1%}",
            f"{(result.best.attainment - gain.without.attainment) * 100:+.1f}",
            *_seconds(gain.without),
        )  # fmt: skip
    # The last two rows show the gain of all flags together.
    for name, figures in (("none of them", result.start), ("all of them", result.best)):
        points = (result.best.attainment - figures.attainment) * 100
        difference = f"{points:+.1f}" if figures is result.start else ""
        table.add_row(name, "", "", f"{figures.attainment:.1%}", difference, *_seconds(figures))
    console = Console(highlight=False)
    console.print(table)
    limits = ", ".join(map(str, slos))
    console.print(
        f"{requests:,} requests, {result.simulated} settings simulated; met: share of the requests "
        f"that met {limits}."
        + ("" if result.gains else " No flag gains anything here: keep those that you have.")
    )


def _seconds(of: "TuneFigures") -> list[str]:
    return ["-" if value is None else f"{value:#.3g} s" for value in of.p95_s]
