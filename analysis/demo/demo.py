"""`forebay demo`: engines, proxy, replay and report on a laptop."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.replay.engine.flags import SchedulerCls
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.command_line.options import AsJson, EngineGpu, EngineModel, Force, a_time

if TYPE_CHECKING:
    from forebay.analysis.demo.processes import Engines
    from forebay.traces.ground.schema import TraceRequest

EXAMPLE = """Replay chats and shared documents on two simulated H200s twice: by round robin and
through the proxy. Prints a table and writes an HTML report.

First the same traffic is simulated in virtual time, which takes seconds. With --preview the report
shows this simulation, and no server is started.
All servers run with vLLM's --long-prefill-token-threshold 2048, as the documentation recommends, or
with --scheduler-cls forebay.

Example:

  forebay demo --out runs/demo
"""
CHUNK_TOKENS = 2_048

app = new_app(help=EXAMPLE)


def check_out(out: Path, files: Iterable[Path], force: bool) -> None:
    """Raise InputError if both runs and `files` cannot be written to `out`. Creates nothing."""
    from forebay.analysis.demo.side_by_side import PROXIED
    from forebay.replay.results.folder import check_folder
    from forebay.replay.sim.scenario import DIRECT
    from forebay.traces.ground.errors import InputError

    for file in files:
        if file.is_dir():
            raise InputError(f"--out: {file} is a folder; give another folder than {out}")
        if file.exists() and not force:
            raise InputError(f"--out: {file} exists; give another folder or --force")
    for name in (DIRECT, PROXIED):
        check_folder(out / name, force=force)


@app.command(help=EXAMPLE)
def demo(
    out: Annotated[Path, typer.Option(help="folder for the runs and the report")] = Path(
        "runs/demo"
    ),
    preview: Annotated[
        bool, typer.Option("--preview", help="only simulate, in virtual time")
    ] = False,
    time_scale: Annotated[
        float, typer.Option(help="simulated seconds per wall second; lower it on a slow machine")
    ] = 2.5,
    duration: Annotated[
        float,
        a_time("simulated time of arrivals"),
    ] = 200.0,
    model: EngineModel = "Llama-3-8B",
    gpu: EngineGpu = "H200",
    scheduler_cls: SchedulerCls = None,
    seed: Annotated[int, typer.Option(help="seed of the traffic")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    from forebay.analysis.demo.processes import Engines
    from forebay.replay.results.folder import make_folder
    from forebay.traces.reading.jsonl import write_trace
    from forebay.traces.synth.chat_beside_documents import (
        ChatBesideDocuments,
        chat_beside_documents,
    )

    # Options are checked before anything is written or started.
    check_out(out, (out / "trace.jsonl", out / "report.html"), force)
    fleet = Engines(
        model=model,
        gpu=gpu,
        time_scale=time_scale,
        chunk_tokens=None if scheduler_cls else CHUNK_TOKENS,
        scheduler_cls=scheduler_cls,
    )
    fleet.config()  # raises for values that no engine accepts
    spec = ChatBesideDocuments(
        chat_rate_per_s=6.0, document_rate_per_s=0.22, duration_s=duration, seed=seed
    )
    rows = list(chat_beside_documents(spec))
    make_folder(out)
    write_trace(out / "trace.jsonl", rows)
    # The preview always runs. It takes seconds and shows the expected result.
    documents = sum(row.document is not None for row in rows)
    talk(
        f"{len(rows):,} requests in {duration:.0f} s of traffic: {len(rows) - documents:,} chats, "
        f"{documents} questions about 120k-token documents"
    )
    show = not as_json
    results: dict[str, Any] = {
        "preview": _preview(rows, fleet, out if preview else None, show=show)
    }
    if preview:
        results |= _page(out, show=show)
    else:
        results |= _live(rows, fleet, out, seed=seed, force=force, show=show)
    if as_json:
        print_json(results)


def _preview(
    rows: "list[TraceRequest]", fleet: "Engines", out: Path | None, *, show: bool
) -> list[dict[str, Any]]:
    """Simulate the traffic behind each router, print a table if asked, keep two runs in `out`."""
    from forebay.analysis.demo.side_by_side import PROXIED
    from forebay.proxy.config.schema import Config
    from forebay.replay.plan.slo import default_slos
    from forebay.replay.sim.run_folder import keep
    from forebay.replay.sim.scenario import DIRECT, Scenario
    from forebay.replay.sim.sweep import SweepCase, describe, simulate_case
    from forebay.replay.sim.workload import SimWorkload
    from forebay.traces.ground.buckets import DEFAULT_BUCKETS

    talk("preview in virtual time, beside models of three other routers:")
    routers = {  # names in the table, and policies of `forebay simulate`
        DIRECT: DIRECT,
        "least connections": "least_connections",
        "cache-aware": "cache_aware",
        "forebay": Config().routing,
    }
    # Each router plays the same requests.
    engine = replace(fleet.config(), time_scale=1.0)
    workload, slos = SimWorkload(trace=rows), default_slos(DEFAULT_BUCKETS)
    folders, results = {DIRECT: DIRECT, "forebay": PROXIED}, []
    for name, policy in routers.items():
        case = SweepCase({"router": name}, Scenario(engine, fleet.count, policy), workload, slos)
        simulated, window_s = simulate_case(case)
        results.append(describe(case, simulated, window_s))
        if out is not None and name in folders:
            keep(out / folders[name], case, simulated, results[-1], force=True)
    # The table needs rich, which JSON does without.
    if show:
        from rich.console import Console

        from forebay.replay.sim.table import results_table

        Console().print(results_table(results))
    return results


def _live(
    rows: "list[TraceRequest]",
    fleet: "Engines",
    out: Path,
    *,
    seed: int,
    force: bool,
    show: bool,
) -> dict[str, Any]:
    """Replay the traffic to running servers by both ways. Writes the runs and the report."""
    from forebay.analysis.demo.processes import ServerFailed
    from forebay.analysis.demo.side_by_side import side_by_side
    from forebay.replay.plan.options import ReplayOptions
    from forebay.replay.send.drain import run_on_fast_loop

    base = ReplayOptions(trace=out / "trace.jsonl", targets=(), out=out, seed=seed, force=force)
    run_s = rows[-1].arrival_s / fleet.time_scale
    talk(f"now live, on servers and sockets of this machine: two runs of about {run_s:.0f} s each")
    # Both sides replay the same trace, one after the other, each on new engines.
    try:
        ended = run_on_fast_loop(lambda stop: side_by_side(fleet, base, stop))
    except ServerFailed as error:
        print(f"forebay demo: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if not ended:
        print(f"forebay demo: interrupted; the finished measurements are in {out}", file=sys.stderr)
        raise typer.Exit(130)
    return _page(out, show=show)


def _page(out: Path, *, show: bool) -> dict[str, Any]:
    """Compare the two runs in `out`, and write their report, as `forebay report` does."""
    from forebay.analysis.compare.compare import compare
    from forebay.analysis.compare.headline import headline
    from forebay.analysis.demo.side_by_side import PROXIED
    from forebay.analysis.report.report import build_report, write_text
    from forebay.analysis.runs.load import load_runs
    from forebay.replay.sim.scenario import DIRECT

    page = out / "report.html"
    runs = load_runs([out / DIRECT, out / PROXIED])
    comparison = compare(runs[0], runs[1])
    words = headline(comparison)
    write_text(build_report(runs).html, page, True)
    if show:
        from rich.console import Console

        from forebay.analysis.compare.tables import print_headline

        print_headline(comparison, words, Console(highlight=False))
    if words.mood == "doubtful":
        talk("the preview in virtual time does not depend on how busy this machine is")
    talk(f"all figures: forebay compare {out / DIRECT} {out / PROXIED}")
    talk(f"report: {page.resolve().as_uri()}")
    return {"headline": words.summary, "report": str(page), **comparison.as_json()}
