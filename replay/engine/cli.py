"""`forebay engine`: one simulated vLLM server until SIGTERM or Ctrl-C."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from forebay.proxy.command import new_app
from forebay.proxy.runtime.event_loop import fast_runner, short_collections
from forebay.replay.engine.calibration.calibrate_cli import HELP as CALIBRATE_HELP
from forebay.replay.engine.calibration.calibrate_cli import calibrate_command
from forebay.replay.engine.calibration.output import print_shipped
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.faults import Fault, fault_help, parse_fault
from forebay.replay.engine.kv_events import parse_kv_events
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import RunningEngine, start_engine
from forebay.traces.errors import InputError

HELP = f"""One simulated vLLM server: batching, chunked prefill, prefix cache and step times of a
named model on a named GPU, behind vLLM's HTTP API, until SIGTERM or Ctrl-C. All options but --gpu,
--time-scale, --vllm-version, --server-dev-mode, --fault and those of calibrations are vLLM's.

Example:  forebay engine --model llama-3-8b --gpu h200 --port 8001

\b
Faults, for tests of what stands in front (NAME:TOKENS fails after so many tokens of a stream):
{fault_help()}

\b
Without a fault, as vLLM:
  queue limits     503, before the answer or inside a 200 stream
  slow readers     several tokens in one event
  idle connections closed after 5 s
  SIGTERM          finish_reason "abort", once --shutdown-timeout is over
"""

app = new_app()


@app.callback(invoke_without_command=True, help=HELP)
def engine(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(help="phi-3-mini-128k, llama-3-8b, qwen2.5-14b or a config.json; required."),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="h200 (SXM), h200-nvl or a JSON file of its data sheet.")
    ] = "h200",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    time_scale: Annotated[float, typer.Option(help="Simulated seconds in a wall second.")] = 1.0,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients use; default: --model as given.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Context, tokens.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step; default by the GPU's memory.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests in a step; default by the GPU's memory.")
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse equal prefixes.")] = True,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of GPU memory.")] = 0.9,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 16,
    long_prefill_token_threshold: Annotated[
        int, typer.Option(help="Most prefill tokens of one request in a step; 0: no cap.")
    ] = 0,
    enable_chunked_prefill: Annotated[bool, typer.Option(help="Cut long prompts.")] = True,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs or priority.")] = "fcfs",
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(help="KV blocks instead of what fits the GPU.")
    ] = None,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="503 beyond this many unfinished requests.")
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None, typer.Option(help="503 beyond this many prompt tokens not yet answered.")
    ] = None,
    vllm_version: Annotated[
        str, typer.Option(help="Whose rules and defaults: 0.11, 0.20, 0.26, 0.29 or 0.32.")
    ] = "0.32",
    watermark: Annotated[
        float, typer.Option(help="Share of KV blocks kept free when a request is admitted.")
    ] = 0.0,
    scheduler_reserve_full_isl: Annotated[
        bool | None,
        typer.Option(
            "--scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl",
            help="Admit when the whole prompt fits, not just its first chunk; default: yes, from "
            "0.20 on.",
        ),
    ] = None,
    long_prefill_token_threshold_adaptive: Annotated[
        bool, typer.Option(help="Raise the threshold to a fair share of the budget.")
    ] = False,
    max_num_active_seqs: Annotated[
        int | None, typer.Option(help="Requests running at once; default: --max-num-seqs.")
    ] = None,
    async_scheduling: Annotated[
        bool,
        typer.Option(
            help="Plan a step before the tokens of the one before are known. vLLM does on a GPU; "
            "off here, because step times were fitted with it off."
        ),
    ] = False,
    enable_request_id_headers: Annotated[
        bool, typer.Option("--enable-request-id-headers", help="Echo X-Request-Id.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Of ids, output lengths and words.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Step-time constants, as `calibrate -o` writes them.")
    ] = None,
    list_calibrations: Annotated[
        bool, typer.Option("--list-calibrations", help="Print the shipped ones and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print that list as data.")] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="VLLM_API_KEY", help="Asked for on /v1/*; may be given again."),
    ] = None,
    shutdown_timeout: Annotated[
        int, typer.Option(help="Simulated seconds to finish in after SIGTERM; 0: abort all.")
    ] = 0,
    sse_keep_alive_interval: Annotated[
        int, typer.Option(help="Comment in a stream silent for so many simulated s; 0: none.")
    ] = 0,
    enable_server_load_tracking: Annotated[
        bool, typer.Option("--enable-server-load-tracking", help="Count on /load.")
    ] = False,
    server_dev_mode: Annotated[
        bool,
        typer.Option(
            "--server-dev-mode",
            envvar="VLLM_SERVER_DEV_MODE",
            help="Serve POST /reset_prefix_cache.",
        ),
    ] = False,
    kv_events_config: Annotated[
        str | None,
        typer.Option(help="JSON as vLLM's; needs pip install 'forebay\\[kv-events]'."),
    ] = None,
    fault: Annotated[str | None, typer.Option(help="NAME or NAME:TOKENS; see above.")] = None,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if list_calibrations:
        print_shipped(as_json)
        return
    if model is None:
        raise InputError("Missing option '--model': e.g. --model llama-3-8b")
    config = EngineConfig(
        model=model,
        gpu=gpu,
        time_scale=time_scale,
        served_model_name=served_model_name,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
        gpu_memory_utilization=gpu_memory_utilization,
        block_size=block_size,
        long_prefill_token_threshold=long_prefill_token_threshold,
        enable_chunked_prefill=enable_chunked_prefill,
        scheduling_policy=scheduling_policy,
        num_gpu_blocks_override=num_gpu_blocks_override,
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        vllm_version=vllm_version,
        watermark=watermark,
        scheduler_reserve_full_isl=scheduler_reserve_full_isl,
        long_prefill_token_threshold_adaptive=long_prefill_token_threshold_adaptive,
        max_num_active_seqs=max_num_active_seqs,
        async_scheduling=async_scheduling,
        enable_request_id_headers=enable_request_id_headers,
        seed=seed,
        calibration=calibration,
    )
    options = ServerOptions(
        api_key=tuple(api_key or ()),
        shutdown_timeout=shutdown_timeout,
        sse_keep_alive_interval=sse_keep_alive_interval,
        enable_server_load_tracking=enable_server_load_tracking,
        server_dev_mode=server_dev_mode,
        kv_events=parse_kv_events(kv_events_config) if kv_events_config else None,
    )
    chosen = parse_fault(fault) if fault else None
    with fast_runner() as runner:
        died = runner.run(_serve(config, options, host, port, chosen))
    if died:
        print("forebay engine: the engine died, as --fault engine-dead asks", file=sys.stderr)
        raise typer.Exit(1)


app.command("calibrate", help=CALIBRATE_HELP)(calibrate_command)


async def _serve(
    config: EngineConfig, options: ServerOptions, host: str, port: int, fault: Fault | None
) -> bool:
    """Serve until a signal; whether the engine died instead."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    try:
        async with start_engine(
            config, host=host, port=port, fault=fault, options=options
        ) as running:
            print(start_line(config, running), flush=True)
            stopped = asyncio.create_task(stop.wait())
            with short_collections():
                await asyncio.wait({stopped, running.stepping}, return_when="FIRST_COMPLETED")
            stopped.cancel()
            return running.loop.died.is_set()
    except OSError as error:
        raise InputError(
            f"--host {host} --port {port}: cannot listen: {error.strerror}; use another port"
        ) from error


def start_line(config: EngineConfig, running: RunningEngine) -> str:
    """What one line says of a server that has started, in the words of vLLM's start-up log."""
    core = running.core
    return (
        f"{running.url}  {core.model.name} on {core.gpu.name}, served as {config.served_name}; "
        f"GPU KV cache size: {core.kv_tokens:,} tokens; maximum concurrency for "
        f"{config.context:,} tokens per request: {core.kv_tokens / config.context:.2f}x; "
        f"time scale {config.time_scale:g}"
    )
