"""`forebay simulate`: parse the options, simulate, print one table."""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.replay.engine.flags import EngineFlags
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.garbage import no_collections
from forebay.traces.ground.command_line.messages import print_json
from forebay.traces.ground.command_line.options import (
    AsJson,
    EngineModel,
    Force,
    Jobs,
    PacedTrafficOptions,
    Turns,
    same_named,
    takes_options,
)
from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    from forebay.proxy.config.schema import Config
    from forebay.replay.sim.scenario import Scenario
    from forebay.replay.sim.sweep import SweepCase
    from forebay.replay.sim.workload import SimWorkload

EXAMPLE = """Simulate a fleet in virtual time: the proxy's own decisions, simulated engines.

No sockets and no waiting; equal input gives equal output. Give --sweep more than once to simulate
every combination, on all cores.

Example:

  forebay simulate trace.jsonl --gpus 4 --rate 30 --sweep policy=direct,warm_or_least_work
"""

DEFAULT_POLICY = "warm_or_least_work"

app = new_app(help=EXAMPLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArguments(PacedTrafficOptions):
    """The options of `forebay simulate` as they are typed."""

    gpus: Annotated[
        int, typer.Option(help="number of engines, each on a GPU of its own, or on --tp GPUs")
    ] = 2
    pools: Annotated[
        str | None,
        typer.Option(help="PREFILL+DECODE engines, e.g. 1+3; default: each engine does both"),
    ] = None
    kv_link: Annotated[
        str,
        typer.Option(help="speed, and latency, of each engine's link between these pools"),
    ] = "400Gbps"
    policy: Annotated[
        str,
        typer.Option(help="routing policy, FILE.py:NAME, a model of another router, or direct"),
    ] = DEFAULT_POLICY
    model: EngineModel = "Llama-3-8B"
    gpu: Annotated[str, typer.Option(help="GPU of the engines; a mix: h200+h100+l40s")] = "H200"
    calibration: Annotated[
        Path | None, typer.Option(help="step-time constants, as `engine fit -o` writes them")
    ] = None
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=VALUE,VALUE: gpus, pools, policy, rate, load, seed or an engine option"
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            help="the proxy's YAML: buckets, affinity, admission, routing, and the backends' "
            "long_prefill_token_threshold and scheduler"
        ),
    ] = None
    load: Annotated[
        float | None, typer.Option(help="rate as a share of what the engines can complete")
    ] = None
    turns: Turns = "wait"
    exact: Annotated[
        bool, typer.Option("--exact", help="compute every engine step (slow; the same times)")
    ] = False
    stream: Annotated[
        bool,
        typer.Option("--stream", help="keep no request in memory: for traces of millions of rows"),
    ] = False
    out: Annotated[
        Path | None, typer.Option(help="keep the run (without --sweep) for compare and report")
    ] = None
    force: Force = False
    explain: Annotated[
        str | None,
        typer.Option(help="id of one request: show why it waited and why it went to its engine"),
    ] = None
    possible: Annotated[
        bool,
        typer.Option("--possible", help="bound what any scheduler could reach (slow)"),
    ] = False
    jobs: Jobs = None
    ray: Annotated[
        str | None, typer.Option(help="address of a Ray cluster to sweep on, or local")
    ] = None
    as_json: AsJson = False

    def check(self, axes: Collection[str]) -> None:
        """Raise InputError for options that exclude each other, or a folder that is not free."""
        sweeps = bool(axes)
        if self.out is not None:
            if sweeps:
                raise InputError("--out keeps one run: leave out --sweep, or take --json")
            from forebay.replay.results.folder import (
                check_folder,  # takes 0.3 s: it imports aiohttp
            )

            check_folder(self.out, force=self.force)
        apart = sweeps or self.possible or self.out is not None or self.explain is not None
        if self.stream and apart:
            raise InputError(
                "--stream keeps no request: leave out --sweep, --possible, --out and --explain"
            )
        if "seed" in axes and self.arrivals in ("trace", "constant"):
            raise InputError(
                f"--sweep seed: nothing is random in --arrivals {self.arrivals}, so all seeds give "
                "the same; give --arrivals poisson, or a trace made with another seed"
            )
        if self.explain is not None and (sweeps or self.out is not None or self.policy == "direct"):
            raise InputError(
                "--explain: leave out --sweep and --out, and take a policy of the proxy"
            )

    def scenario(self, flags: EngineFlags, *, sweeps_policy: bool) -> "Scenario":
        """Make the scenario. The routing of --config counts only while --policy is the default.

        --long-prefill-token-threshold and --scheduler-cls take precedence over --config.
        """
        from forebay.replay.engine.config import EngineConfig
        from forebay.replay.sim.engine.pools import parse_link
        from forebay.replay.sim.scenario import Scenario, flags_of, parse_pools, split_gpus

        first, mix = split_gpus(self.gpu)
        proxy = proxy_config(self.config)
        policy = self.policy
        if self.config is not None and policy == DEFAULT_POLICY and not sweeps_policy:
            policy = proxy.routing
        values = flags.values()
        values |= {name: value for name, value in flags_of(proxy).items() if not values[name]}
        return Scenario(
            EngineConfig(self.model, first, calibration=self.calibration, **values),
            self.gpus,
            policy,
            proxy,
            self.exact,
            explained=self.explain is not None,
            gpu_mix=mix,
            pools=None if self.pools is None else parse_pools(self.pools),
            kv_link=parse_link(self.kv_link),
        )

    def workload(self) -> "SimWorkload":
        from forebay.replay.plan.schedule import parse_arrivals
        from forebay.replay.sim.workload import SimWorkload

        arrivals = {"arrivals": parse_arrivals(self.arrivals)}
        return SimWorkload(**same_named(self, SimWorkload) | arrivals)


HEADINGS = {
    "Fleet": "gpus pools kv-link policy model gpu calibration config exact",
    "Sweep": "sweep jobs ray",
    "Traffic": "rate load speed arrivals duration turns seed format skip-bad too-long",
    "Engines": "tensor-parallel-size quantization kv-cache-dtype speculative-config acceptance "
    "disable-hybrid-kv-cache-manager enable-lora max-loras max-lora-rank "
    "max-model-len max-num-batched-tokens max-num-seqs enable-prefix-caching "
    "gpu-memory-utilization block-size long-prefill-token-threshold enable-chunked-prefill "
    "scheduling-policy scheduler-cls additional-config num-gpu-blocks-override vllm-version "
    "watermark scheduler-reserve-full-isl long-prefill-token-threshold-adaptive "
    "max-num-active-seqs prefill-schedule-interval async-scheduling api-server-count "
    "renderer-num-workers",
    "Output": "slo possible stream explain out force json",
}


@app.command(help=EXAMPLE, headings=HEADINGS)
@takes_options
def simulate_command(arguments: SimulateArguments, flags: EngineFlags) -> None:
    with no_collections():
        _simulate(arguments, flags)


def _simulate(arguments: SimulateArguments, flags: EngineFlags) -> None:
    from forebay.replay.plan.slo import default_slos, parse_slos
    from forebay.replay.sim.sweep import cases, parse_axes, run_all, run_on_ray

    # Check the question before anything is simulated.
    axes = parse_axes(arguments.sweep or ())
    arguments.check(axes)
    scenario = arguments.scenario(flags, sweeps_policy="policy" in axes)
    slos = default_slos(scenario.buckets())
    if arguments.slo is not None:
        slos = parse_slos(arguments.slo, [bucket.name for bucket in scenario.buckets()])
    sweep = list(cases(axes, scenario, arguments.workload(), slos))
    if arguments.possible and any(case.scenario.pools for case in sweep):
        raise InputError("--possible: its bound is of engines without pools; leave it out")
    # Step times without a calibration are guesses, and the user is told so.
    remarks = (remark for case in sweep for remark in case.scenario.constants_remarks())
    for remark in dict.fromkeys(remarks):
        print(f"forebay simulate: {remark}", file=sys.stderr)
    # One request is explained, one case goes to a folder, and many run in parallel.
    if arguments.explain is not None:
        _explain(sweep[0], arguments.explain, as_json=arguments.as_json)
        return
    if arguments.stream:
        from forebay.replay.sim.stream import stream_case

        results = [stream_case(sweep[0])]
    elif arguments.out is not None:
        results = [
            _kept(sweep[0], arguments.out, force=arguments.force, bounded=arguments.possible)
        ]
    elif arguments.ray:
        results = list(run_on_ray(sweep, arguments.ray, bounded=arguments.possible))
    else:
        results = list(run_all(sweep, arguments.jobs, bounded=arguments.possible))
    show(results, as_json=arguments.as_json)


def show(results: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(results if len(results) > 1 else results[0])
        return
    from rich.console import Console

    from forebay.replay.sim.table import results_table

    Console().print(results_table(results))


def _kept(case: "SweepCase", folder: Path, *, force: bool, bounded: bool) -> dict[str, Any]:
    from forebay.replay.sim.run_folder import keep
    from forebay.replay.sim.sweep import describe, simulate_case

    simulated, window_s = simulate_case(case)
    summary = describe(case, simulated, window_s, bounded=bounded)
    keep(folder, case, simulated, summary, force=force)
    return summary


def _explain(case: "SweepCase", request_id: str, *, as_json: bool) -> None:
    from forebay.proxy.diagnose.explain_cli import show as show_receipt
    from forebay.proxy.diagnose.receipt_text import receipt_fields
    from forebay.replay.sim.sweep import simulate_case

    simulated, _ = simulate_case(case)
    receipts = simulated.receipts
    assert receipts is not None  # the scenario is explained
    receipt = receipts.find(request_id)
    if receipt is None:
        raise InputError(f"--explain {request_id}: no such request was simulated")
    show_receipt(receipt_fields(receipt, receipt.ended_at, receipts.keep), as_json=as_json)


def proxy_config(path: Path | None) -> "Config":
    """Read the proxy's YAML, or return the defaults (InputError: a bad file)."""
    from forebay.proxy.config.schema import Config

    if path is None:
        return Config()
    from forebay.proxy.config.sources import load_config  # takes 50 ms: it imports yaml

    return load_config(path, {}, {}, to_serve=False)
