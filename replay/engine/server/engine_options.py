"""The options of `forebay engine`, with their help texts and defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags, ServerFlags
from forebay.replay.engine.kv_events import parse_kv_events
from forebay.replay.engine.server.options import ServerOptions
from forebay.traces.command_line.options import same_named
from forebay.traces.errors import InputError


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One further option of the command for each field, with the name in `EngineConfig`."""

    model: Annotated[
        str | None,
        typer.Option(help="phi-3-mini-128k, llama-3-8b, qwen2.5-14b or a config.json; required."),
    ] = None
    gpu: Annotated[
        str,
        typer.Option(help="h200, h100, a100, b200, l40s, rtx-4090, mi300x or a JSON data sheet."),
    ] = "h200"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    time_scale: Annotated[float, typer.Option(help="Simulated seconds in a wall second.")] = 1.0
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients use; default: --model as given.")
    ] = None
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="Answer 503 beyond this many unfinished requests.")
    ] = None
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(help="Answer 503 beyond this many prompt tokens without a first token."),
    ] = None
    enable_request_id_headers: Annotated[
        bool, typer.Option("--enable-request-id-headers", help="Echo X-Request-Id.")
    ] = False
    seed: Annotated[
        int | None, typer.Option(help="Random seed of ids, output lengths and words.")
    ] = None
    calibration: Annotated[
        Path | None, typer.Option(help="Step-time constants, as `calibrate -o` writes them.")
    ] = None
    list_calibrations: Annotated[
        bool, typer.Option("--list-calibrations", help="Print the shipped calibrations and exit.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print that list as data.")] = False
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="VLLM_API_KEY", help="Bearer token that /v1/* requires; may be given again."
        ),
    ] = None
    startup_time: Annotated[
        float,
        typer.Option(help="Simulated seconds until the port opens, as vLLM loads its model."),
    ] = 0.0
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            help="Simulated seconds that running requests get after SIGTERM; 0: abort all."
        ),
    ] = 0
    sse_keep_alive_interval: Annotated[
        int,
        typer.Option(
            help="Simulated seconds of silence in a stream before a comment is sent; 0: never."
        ),
    ] = 0
    enable_server_load_tracking: Annotated[
        bool, typer.Option("--enable-server-load-tracking", help="Count requests on /load.")
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool,
        typer.Option(
            "--enable-prompt-tokens-details", help="Report cached prompt tokens in each usage."
        ),
    ] = False
    server_dev_mode: Annotated[
        bool,
        typer.Option(
            "--server-dev-mode",
            envvar="VLLM_SERVER_DEV_MODE",
            help="Serve POST /reset_prefix_cache.",
        ),
    ] = False
    kv_events_config: Annotated[
        str | None,
        typer.Option(help="JSON as vLLM's; needs pip install 'forebay[kv-events]'."),
    ] = None
    fault: Annotated[str | None, typer.Option(help="NAME or NAME:TOKENS; see above.")] = None

    def config(self, flags: EngineFlags) -> EngineConfig:
        """Return the checked options of the engine itself (InputError: a wrong value)."""
        if self.model is None:
            raise InputError("Missing option '--model': e.g. --model llama-3-8b")
        return EngineConfig(**same_named(self, EngineConfig), **flags.values())

    def server(self, flags: ServerFlags) -> ServerOptions:
        """Return the checked options of the API server (InputError: a wrong value)."""
        values = {
            "api_key": tuple(self.api_key or ()),
            "kv_events": parse_kv_events(text) if (text := self.kv_events_config) else None,
            "data_parallel_size": 1 if (ranks := flags.data_parallel_size) is None else ranks,
        }
        return ServerOptions(**same_named(self, ServerOptions) | values)
