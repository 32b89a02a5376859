"""Options of the API server around an engine. `config` has the options of the engine itself."""

import math
from dataclasses import dataclass

from forebay.replay.engine.kv_events import KvEventsConfig
from forebay.traces.errors import InputError

MOST_RANKS = 64
"""All ranks run in one process, so a number that only a typing error asks for is refused."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """vLLM's options of the same names, and startup_time. Seconds are simulated seconds.

    Attributes:
        startup_time: seconds after the start in which the port is not open yet.
        api_key: bearer tokens, of which /v1/* requires one. Empty: it requires no key.
        shutdown_timeout: seconds that running requests get to finish after SIGTERM.
        sse_keep_alive_interval: seconds of silence after which a stream gets a comment. 0: never.
        enable_server_load_tracking: /load counts requests. Otherwise it answers 0.
        server_dev_mode: VLLM_SERVER_DEV_MODE, serves POST /reset_prefix_cache.
        enable_prompt_tokens_details: usage tells the cached tokens of the prompt. On here, off in
            `forebay engine`, as in `vllm serve`.
        kv_events: how the prefix cache publishes its changes. None: not at all.
        data_parallel_size: engines behind the server's URL, each with a KV cache of its own.
    """

    startup_time: float = 0.0
    api_key: tuple[str, ...] = ()
    shutdown_timeout: int = 0
    sse_keep_alive_interval: int = 0
    enable_server_load_tracking: bool = False
    server_dev_mode: bool = False
    enable_prompt_tokens_details: bool = True
    kv_events: KvEventsConfig | None = None
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("startup_time", "shutdown_timeout", "sse_keep_alive_interval"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{flag} {seconds:g}: give seconds, or 0 for none")
        if not 1 <= self.data_parallel_size <= MOST_RANKS:
            raise InputError(
                f"--data-parallel-size {self.data_parallel_size}: give 1 to {MOST_RANKS}"
            )
        if not all(self.api_key):
            raise InputError("--api-key: an empty key; leave the option out to require none")
