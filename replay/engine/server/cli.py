"""`forebay engine`: run one simulated vLLM server until SIGTERM or Ctrl-C."""

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.engine.calibration.output import print_shipped
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.loop.faults import Fault, fault_help, parse_fault
from forebay.replay.engine.server.options import ServerOptions
from forebay.replay.engine.server.server import RunningEngine, start_engine
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.options import takes_options
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.event_loop import fast_runner, short_collections

HELP = f"""Run one simulated vLLM server until SIGTERM or Ctrl-C.

It has the batching, chunked prefill, prefix cache and step times of a named model on a named GPU,
behind vLLM's HTTP API. All options are vLLM's, except --gpu, --time-scale, --vllm-version,
--acceptance, --server-dev-mode, --startup-time, --fault and those of calibrations.

Example:  forebay engine --model llama-3-8b --gpu h200 --port 8001

\b
Faults, to test the proxy in front (NAME:TOKENS: after so many tokens):
{fault_help()}

\b
Without a fault, as vLLM:
  queue limits     503, before the answer or inside a 200 stream
  slow readers     several tokens in one event
  idle connections closed after 5 s
  SIGTERM          finish_reason "abort", once --shutdown-timeout is over
"""

HEADINGS = {
    "Model and GPU": "model gpu tensor-parallel-size data-parallel-size quantization "
    "kv-cache-dtype speculative-config acceptance disable-hybrid-kv-cache-manager enable-lora "
    "max-loras max-lora-rank vllm-version calibration list-calibrations time-scale seed",
    "HTTP server": "port host served-model-name api-key max-num-queued-reqs max-num-queued-tokens "
    "startup-time shutdown-timeout sse-keep-alive-interval enable-request-id-headers "
    "enable-server-load-tracking enable-prompt-tokens-details server-dev-mode kv-events-config "
    "api-server-count renderer-num-workers fault",
    "Scheduling and KV cache": "max-model-len max-num-batched-tokens max-num-seqs "
    "enable-prefix-caching gpu-memory-utilization block-size long-prefill-token-threshold "
    "enable-chunked-prefill scheduling-policy scheduler-cls additional-config "
    "num-gpu-blocks-override watermark scheduler-reserve-full-isl "
    "long-prefill-token-threshold-adaptive max-num-active-seqs "
    "prefill-schedule-interval async-scheduling",
    "Output": "json",
}
app = new_app(headings=HEADINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """The options that neither the engine nor its API server has, and what names them here."""

    model: Annotated[
        str | None,
        typer.Option(help="A name such as Qwen3-8B (a wrong one lists all) or a config.json."),
    ] = None
    gpu: Annotated[
        str,
        typer.Option(help="h200, h100, a100, b200, l40s, rtx-4090, mi300x or a JSON data sheet."),
    ] = "h200"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    calibration: Annotated[
        Path | None, typer.Option(help="Step-time constants, as `engine fit -o` writes them.")
    ] = None
    list_calibrations: Annotated[
        bool, typer.Option("--list-calibrations", help="Print the shipped calibrations and exit.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print that list as data.")] = False
    fault: Annotated[str | None, typer.Option(help="NAME or NAME:TOKENS; see above.")] = None


@app.callback(invoke_without_command=True, help=HELP)
@takes_options
def engine(
    context: typer.Context,
    options: EngineCommand,
    new_server: Callable[..., ServerOptions],
    new_config: Callable[..., EngineConfig],
) -> None:
    if context.invoked_subcommand is not None:
        return
    if options.list_calibrations:
        print_shipped(options.as_json)
        return
    if options.model is None:
        raise InputError("Missing option '--model': e.g. --model llama-3-8b")
    # Ranks of a running server need not be servers of their own.
    config, server = new_config(data_parallel_size=None), new_server()
    fault = parse_fault(options.fault) if options.fault else None
    with fast_runner() as runner:
        died = runner.run(_serve(config, server, options.host, options.port, fault))
    if died:
        print("forebay engine: the engine died, as --fault engine-dead asks", file=sys.stderr)
        raise typer.Exit(1)


async def _serve(
    config: EngineConfig, options: ServerOptions, host: str, port: int, fault: Fault | None
) -> bool:
    """Serve until a signal arrives or the engine dies. True if it died."""
    # While the engine starts, a signal ends it at once.
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    serving = asyncio.current_task()
    assert serving is not None
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, serving.cancel)  # no request to finish yet
    try:
        async with start_engine(
            config, host=host, port=port, fault=fault, options=options
        ) as running:
            # From here on there are requests to finish: a signal ends the wait, not the task.
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(name, stop.set)
            if remark := config.constants_remark():
                print(f"forebay engine: {remark}", file=sys.stderr, flush=True)
            print(start_line(config, running), flush=True)
            stopped = asyncio.create_task(stop.wait())
            with short_collections():
                await asyncio.wait({stopped, running.stepping}, return_when="FIRST_COMPLETED")
            stopped.cancel()
            return running.loop.died.is_set()
    except asyncio.CancelledError:
        return False
    except OSError as error:
        raise InputError(
            f"--host {host} --port {port}: cannot listen: {error.strerror}; give another one"
        ) from error


def start_line(config: EngineConfig, running: RunningEngine) -> str:
    """Describe a server that has started, in the words of vLLM's start-up log."""
    core, shares = running.core, config.tensor_parallel_size
    gpus = core.gpu.name if shares == 1 else f"{shares} x {core.gpu.name}"
    if (ranks := len(running.loop.loops)) > 1:
        gpus = f"each of {ranks} ranks of {gpus}" if shares > 1 else f"each of {ranks} {gpus}"
    return (
        f"{running.url}  {core.model.name} on {gpus}, served as {config.served_name}; "
        f"GPU KV cache size: {core.kv_tokens:,} tokens; maximum concurrency for "
        f"{config.context:,} tokens per request: {core.kv_tokens / config.context:.2f}x; "
        f"time scale {config.time_scale:g}"
    )
