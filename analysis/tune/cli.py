"""`forebay tune`: parse the options, read the traffic, play the set-ups, show the answer."""

import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.replay.engine.flags import EngineFlags
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json
from forebay.traces.ground.command_line.options import (
    AsJson,
    EngineGpu,
    Force,
    FormatName,
    Jobs,
    SloText,
    TooLong,
    a_time,
    takes_options,
)
from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forebay.analysis.tune.figures import Observed
    from forebay.analysis.tune.otherwise import Answer
    from forebay.analysis.tune.traffic import Traffic
    from forebay.replay.sim.scenario import Scenario
    from forebay.traces.ground.schema import TraceRequest

EXAMPLE = """Say what would have been with other routers, flags and numbers of GPUs.

SOURCE is a trace, a capture, or the admin URL of a proxy that captures its traffic, in mode observe
or shape. The twin is fitted to the times that a capture has, and its error is said. Differences
below that error are called level. A twin that cannot repeat what happened gives no advice, and the
status is 1.

vLLM's flags, --policy and --gpus describe the present set-up.

Example:

  forebay tune http://127.0.0.1:9090 --since 1d --model llama-3-8b --gpu h200 -o otherwise.html
"""
DEFAULT_MODEL = "Llama-3-8B"
MOST_PLAYED, FEW_FITTED, LAST_BYTES = 1_000, 60, 8 << 20
"""Captured requests that `forebay doctor` plays, and that it fits the twin to: three seconds."""

app = new_app(help=EXAMPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneArguments:
    """The options of `forebay tune` as they are typed."""

    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="trace, capture, or admin URL of a proxy")
    ]
    since: Annotated[float | None, a_time("only the last part of the traffic", "--since")] = None
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="write one page: otherwise.html")
    ] = None
    force: Force = False
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs in all; default: of the servers that answered, else 1"),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            help="present router: direct (round robin) or as simulate; default: the proxy's"
        ),
    ] = None
    config: Annotated[
        Path | None, typer.Option(help="the proxy's YAML: buckets, routing, flags of backends")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="model of the servers; default: the proxy's, or Llama-3-8B")
    ] = None
    gpu: EngineGpu = "H200"
    calibration: Annotated[
        Path | None, typer.Option(help="step-time constants of `engine fit -o`; nothing is fitted")
    ] = None
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0.0, help="price of a GPU for an hour, in any currency")
    ] = None
    requests: Annotated[int, typer.Option(min=100, help="most requests, from the first")] = 100_000
    format_name: FormatName = None
    too_long: TooLong = "error"
    slo: SloText = None
    jobs: Jobs = None
    as_json: AsJson = False


@app.command(help=EXAMPLE)
@takes_options
def tune_command(arguments: TuneArguments, flags: EngineFlags) -> None:
    from forebay.analysis.tune.calibrate import calibrated
    from forebay.analysis.tune.otherwise import Players, otherwise
    from forebay.analysis.tune.plays import Player, play_here, start_player
    from forebay.analysis.tune.traffic import fitted, observed_of, read_traffic
    from forebay.replay.parts.pool import process_pool
    from forebay.replay.plan.slo import default_slos, parse_slos

    out = arguments.out
    if out is not None and out.exists() and not arguments.force:  # before a minute of plays
        raise InputError(f"--out {out}: exists; give another name, or --force to overwrite it")
    since_s = inf if arguments.since is None else arguments.since
    traffic = read_traffic(arguments.source, since_s, arguments.format_name, arguments.requests)
    base = _present(arguments, flags, traffic)
    # Step times without a calibration are guesses, and the user is told so.
    for remark in base.constants_remarks():
        print(f"forebay tune: {remark}", file=sys.stderr)
    slos = default_slos(base.buckets())
    if arguments.slo is not None:
        slos = parse_slos(arguments.slo, [bucket.name for bucket in base.buckets()])
    rows = fitted(traffic.rows, base.engine.context, arguments.too_long)
    observed = observed_of(rows)
    better = None
    if observed is not None and arguments.calibration is None:
        better = calibrated(base, rows)
    # The set-ups are played in processes.
    jobs = arguments.jobs or len(os.sched_getaffinity(0))
    pooled = process_pool(jobs, partial(start_player, rows, slos)) if jobs > 1 else nullcontext()
    with pooled as pool:
        in_turn: Players = partial(map, Player(rows, slos).play)
        run = in_turn if pool is None else partial(pool.map, play_here)
        answer = otherwise(
            base,
            rows,
            slos,
            run,
            observed=observed,
            fitted=better,
            price_per_gpu_hour=arguments.price_per_gpu_hour,
        )
    _show(answer, traffic, arguments)
    if answer.twin.why_not:
        raise typer.Exit(1)


def largest_gain(admin: str, since_s: float, config: Path | None) -> tuple[str, str] | None:
    """Return a sentence on the gain by vLLM's flag or the scheduler class, and how to start it.

    For `forebay doctor`, within seconds: the recent requests of a proxy that captures them. None if
    they are few, if neither is better by more than the twin is off, or if the twin does not repeat
    what happened.
    """
    import shlex

    from forebay.analysis.tune.setups import serve_words
    from forebay.analysis.tune.traffic import fitted, observed_of, read_traffic

    # Read the traffic and the present set-up.
    try:
        traffic = read_traffic(admin, since_s, None, MOST_PLAYED, last_bytes=LAST_BYTES)
        base = _present(TuneArguments(source=admin, config=config), EngineFlags(), traffic)
        rows = fitted(traffic.rows, base.engine.context, "error")
    except InputError:  # nothing is captured, or the model is not known
        return None
    observed = observed_of(rows)
    answer = None if observed is None else _flags_played(base, rows, observed)
    if answer is None or answer.verdict.best is None:
        return None
    # Name the flags that the present servers lack.
    present = set(serve_words(base.engine))
    words = serve_words(answer.verdict.best.set_up.scenario.engine)
    flags = shlex.join(word for word in words if word not in present)
    said = answer.verdict.sentence.removesuffix(".")
    return (
        f"{said[0].lower()}{said[1:]} ({answer.requests:,} captured requests, played; the twin is "
        f"off by {answer.twin.error:.0%})",
        f"start vLLM with {flags} and give it to each backend in the proxy's file (`forebay tune "
        f"{admin}` compares more set-ups)",
    )


def _flags_played(
    base: "Scenario", rows: "Sequence[TraceRequest]", observed: "Observed"
) -> "Answer":
    """Play the flag and the scheduler class. The twin is fitted if it repeats nothing as it is."""
    from forebay.analysis.tune.calibrate import calibrated
    from forebay.analysis.tune.otherwise import otherwise
    from forebay.analysis.tune.plays import Player
    from forebay.analysis.tune.setups import SCHEDULER
    from forebay.replay.plan.slo import default_slos

    slos = default_slos(base.buckets())
    run = partial(map, Player(rows, slos).play)
    ask = partial(otherwise, observed=observed, most_change=SCHEDULER)
    answer = ask(base, rows, slos, run)
    if answer.twin.why_not:
        with suppress(ModuleNotFoundError):  # scipy, which the proxy does not need
            if (better := calibrated(base, rows, FEW_FITTED)) is not None:
                return ask(better, rows, slos, run)
    return answer


def _show(answer: "Answer", traffic: "Traffic", arguments: TuneArguments) -> None:
    """Write the page, and print the answer."""
    from forebay.analysis.tune.show import as_json, print_answer

    priced = arguments.price_per_gpu_hour is not None
    if arguments.out is not None:
        from forebay.analysis.report.report import write_text
        from forebay.analysis.tune.page import page

        text = page(answer, traffic.name, traffic.remarks, priced=priced)
        write_text(text, arguments.out, arguments.force)
    if arguments.as_json:
        print_json(as_json(answer, traffic.name, traffic.remarks))
    else:
        print_answer(answer, traffic.remarks, priced=priced)


def _present(arguments: TuneArguments, flags: EngineFlags, traffic: "Traffic") -> "Scenario":
    """Return the present set-up: as the options say, else the configuration, else the proxy."""
    from forebay.replay.engine.config import EngineConfig
    from forebay.replay.engine.limits import FOREBAY_CLASS
    from forebay.replay.sim.cli import proxy_config
    from forebay.replay.sim.scenario import Scenario, flags_of

    # The proxy that runs knows best.
    config, proxy = proxy_config(arguments.config), traffic.proxy
    options = flags_of(config)
    routing = config.observe.routing if config.mode == "observe" else config.routing
    if proxy is not None:
        routing = proxy.routing
        if proxy.scheduler == "forebay":
            options["scheduler_cls"] = FOREBAY_CLASS
        elif proxy.threshold:
            options["long_prefill_token_threshold"] = proxy.threshold
    values = flags.values()
    values |= {name: value for name, value in options.items() if not values[name]}
    # Engines as these options say, and as many as answered.
    model = arguments.model or (proxy.model if proxy else "") or DEFAULT_MODEL
    engine = EngineConfig(model, arguments.gpu, calibration=arguments.calibration, **values)
    ranks = engine.tensor_parallel_size
    count = proxy.servers if proxy is not None else traffic.servers()
    servers, left = divmod(arguments.gpus or max(1, count) * ranks, ranks)
    if left:
        raise InputError(
            f"--gpus {arguments.gpus}: not a multiple of --tensor-parallel-size "
            f"{ranks}; change one of them"
        )
    return Scenario(engine, servers, arguments.policy or routing, config)
