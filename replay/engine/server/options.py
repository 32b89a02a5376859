"""Options of the API server around an engine. `config` has the options of the engine itself."""

import math
from dataclasses import dataclass
from typing import Annotated

import typer

from forebay.replay.engine.flags import flag_of
from forebay.replay.engine.kv_events import KvEventsConfig, parse_kv_events
from forebay.traces.ground.errors import InputError

MOST_RANKS = 64
"""All ranks run in one process, so a number that only a typing error asks for is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """vLLM's options of the same names, and startup_time (InputError: a wrong value)."""

    startup_time: Annotated[
        float,
        typer.Option(help="Simulated seconds until the port opens, as vLLM loads its model."),
    ] = 0.0
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="VLLM_API_KEY", help="Bearer token that /v1/* requires; may be given again."
        ),
    ] = None
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
    data_parallel_size: Annotated[
        int,
        typer.Option(
            "--data-parallel-size",
            "-dp",
            show_default=False,
            help="Engines behind the URL, each on GPUs of its own, of a dense model; default: 1.",
        ),
    ] = 1

    def __post_init__(self) -> None:
        for name in ("startup_time", "shutdown_timeout", "sse_keep_alive_interval"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise InputError(f"{flag_of(name)} {seconds:g}: give seconds, or 0 for none")
        if not 1 <= self.data_parallel_size <= MOST_RANKS:
            raise InputError(
                f"--data-parallel-size {self.data_parallel_size}: give 1 to {MOST_RANKS}"
            )
        if not all(self.api_key or ()):
            raise InputError("--api-key: an empty key; leave the option out to require none")
        _ = self.kv_events

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Return the settings of KV events. None: the prefix cache publishes no changes."""
        return parse_kv_events(self.kv_events_config) if self.kv_events_config else None
