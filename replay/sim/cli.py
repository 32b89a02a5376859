"""`forebay simulate`: parse the options, simulate, show one table."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.proxy.command import new_app
from forebay.traces.errors import InputError

if TYPE_CHECKING:
    from forebay.proxy.config.schema import Config
    from forebay.replay.sim.sweep import Case

EXAMPLE = """A fleet in virtual time: the proxy's own decisions in front of simulated engines.

No sockets and no waiting; equal input gives equal output. --sweep may be given again: every
combination is simulated, on all cores.

Example:

  forebay simulate trace.jsonl --gpus 4 --rate 30 --sweep policy=direct,warm_or_least_work
"""

app = new_app(help=EXAMPLE)


@app.command(help=EXAMPLE)
def simulate_command(
    trace: Annotated[Path, typer.Argument(help="trace file, - for standard input")],
    gpus: Annotated[int, typer.Option(help="engines, each on a GPU of its own")] = 2,
    policy: Annotated[
        str, typer.Option(help="routing policy of the proxy, or direct: no proxy")
    ] = "warm_or_least_work",
    model: Annotated[str, typer.Option(help="model of the engines")] = "Llama-3-8B",
    gpu: Annotated[str, typer.Option(help="GPU of the engines")] = "H200",
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE,VALUE: gpus, policy, rate, load, seed or an engine option"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="the proxy's YAML: buckets, affinity, admission, routing")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="mean requests a second")] = None,
    load: Annotated[
        float | None, typer.Option(help="the same as a share of what the engines can complete")
    ] = None,
    speed: Annotated[float | None, typer.Option(help="times as fast as the trace")] = None,
    arrivals: Annotated[str, typer.Option(help="trace, constant, poisson or gamma:CV")] = "trace",
    duration: Annotated[float | None, typer.Option(help="only the first seconds")] = None,
    seed: Annotated[int, typer.Option(help="of random arrival gaps")] = 0,
    slo: Annotated[
        str | None,
        typer.Option(help="targets, e.g. chat.ttft=2s,tpot=100ms [default: chat 2s, document 15s]"),
    ] = None,
    too_long: Annotated[
        str, typer.Option(help="rows beyond the model's context: error, truncate or drop")
    ] = "error",
    trace_format: Annotated[
        str | None, typer.Option("--format", help="forebay, mooncake or azure [default: detect]")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="count bad rows")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="compute every engine step (slow; the same times)")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="keep the run (without --sweep) for compare and report")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the run in --out")] = False,
    explain: Annotated[
        str | None, typer.Option(help="id of one request: say why it went where it went, or waited")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes [default: all cores]")] = None,
    ray: Annotated[
        str | None, typer.Option(help="address of a Ray cluster to sweep on, or local")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print data")] = False,
) -> None:
    from forebay.replay.engine.config import EngineConfig
    from forebay.replay.output import check_folder
    from forebay.replay.schedule import parse_arrivals
    from forebay.replay.sim.scenario import Scenario
    from forebay.replay.sim.sweep import cases, parse_axes, run_all, run_on_ray
    from forebay.replay.sim.workload import Workload
    from forebay.replay.slo import default_slos, parse_slos

    axes = parse_axes(sweep or ())
    if out is not None:
        if axes:
            raise InputError("--out keeps one run: leave out --sweep, or take --json")
        check_folder(out, force=force)
    if explain is not None and (axes or out is not None or policy == "direct"):
        raise InputError("--explain: leave out --sweep and --out, and take a policy of the proxy")
    proxy = _proxy_config(config)
    if "policy" in axes or policy != "warm_or_least_work" or config is None:
        chosen = policy
    else:
        chosen = proxy.routing
    scenario = Scenario(
        EngineConfig(model=model, gpu=gpu),
        gpus,
        chosen,
        proxy,
        exact,
        explained=explain is not None,
    )
    names = [bucket.name for bucket in scenario.buckets()]
    slos = default_slos(names) if slo is None else parse_slos(slo, names)
    workload = Workload(
        trace=trace,
        format_name=trace_format,
        skip_bad=skip_bad,
        too_long=too_long,
        arrivals=parse_arrivals(arrivals),
        rate=rate,
        speed=speed,
        load=load,
        duration=duration,
        seed=seed,
    )
    listed = list(cases(axes, scenario, workload, slos))
    if explain is not None:
        _explain(listed[0], explain, as_json=as_json)
        return
    if out is not None:
        results = [_kept(listed[0], out, force=force)]
    else:
        running = run_on_ray(listed, ray) if ray else run_all(listed, jobs)
        results = list(running)
    show(results, as_json=as_json)


def show(results: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        import orjson

        data: Any = results if len(results) > 1 else results[0]
        sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    from rich.console import Console

    from forebay.replay.sim.table import results_table

    Console().print(results_table(results))


def _kept(case: "Case", folder: Path, *, force: bool) -> dict[str, Any]:
    from forebay.replay.sim.run_folder import keep
    from forebay.replay.sim.sweep import describe, simulate_case

    simulated, window_s = simulate_case(case)
    summary = describe(case, simulated, window_s)
    keep(folder, case, simulated, summary, force=force)
    return summary


def _explain(case: "Case", request_id: str, *, as_json: bool) -> None:
    from forebay.proxy.telemetry.explain_cli import show as show_receipt
    from forebay.proxy.telemetry.receipt_text import receipt_fields
    from forebay.replay.sim.sweep import simulate_case

    simulated, _ = simulate_case(case)
    receipts = simulated.receipts
    assert receipts is not None  # the scenario is explained
    receipt = receipts.find(request_id)
    if receipt is None:
        raise InputError(f"--explain {request_id}: no such request was simulated")
    show_receipt(receipt_fields(receipt, receipt.ended_at, receipts.keep), as_json=as_json)


def _proxy_config(path: Path | None) -> "Config":
    from forebay.proxy.config.schema import Config
    from forebay.proxy.config.sources import load_config

    if path is None:
        return Config()
    return load_config(path, {}, {})
