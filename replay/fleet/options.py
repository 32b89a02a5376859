"""The options of `forebay fleet up`, with their help texts, defaults and checks."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.engine.flags import GpuMemoryUtilization, MaxModelLen, PlacementFlags
from forebay.replay.fleet.gpu.vllm_install import read_flags
from forebay.traces.ground.command_line.options import AsJson
from forebay.traces.ground.errors import InputError

DIR = Path("runs/fleet")
Folder = Annotated[
    Path, typer.Option("--dir", help="Folder of state, logs and the proxy's configuration.")
]
FIXED = {
    *("--model", "--host", "--port", "--served-model-name", "--max-model-len", "--max-num-seqs"),
    *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--shutdown-timeout"),
    *("--kv-events-config", "--tensor-parallel-size", "--data-parallel-size"),
    *("--pipeline-parallel-size", "-tp", "-dp", "-pp"),
}
"""Flags that the proxy's configuration depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions(PlacementFlags):
    """One option of `forebay fleet up` for each field. None: by model and machine."""

    model: Annotated[
        str,
        typer.Option(
            help="llama-3-8b, llama-3.1-8b, qwen2.5-14b, phi-3-mini-128k, a Hugging Face "
            "repository or a folder."
        ),
    ]
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VLLM_FLAG]", help="After `--`: flags passed on to `vllm serve`."),
    ] = None
    gpus: Annotated[
        str | None, typer.Option(help="GPU numbers as nvidia-smi's, e.g. 0,1; default: all.")
    ] = None
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Serve on the CPU, with a vLLM built for it.")
    ] = False
    servers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Number of servers, with --cpu; default: 1.")
    ] = None
    config: Annotated[Path | None, typer.Option(help="Proxy configuration to extend.")] = None
    folder: Folder = DIR
    host: Annotated[str, typer.Option(help="Address the servers listen on.")] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the first server; the others have the next ones. 0: free ports.",
        ),
    ] = 8001
    served_model_name: Annotated[
        str | None, typer.Option(help="Name clients use; default: the repository's name.")
    ] = None
    max_model_len: MaxModelLen = None
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Most requests in a step; default: by the KV cache.")
    ] = None
    gpu_memory_utilization: GpuMemoryUtilization = 0.9
    kv_cache_memory_bytes: Annotated[
        str | None,
        typer.Option(help="KV cache size instead of that share, e.g. 4G.  [default on CPU: 1G]"),
    ] = None
    kv_events: Annotated[
        bool, typer.Option(help="Publish KV events: the proxy then knows each server's cache.")
    ] = True
    drain: Annotated[
        int, typer.Option(min=0, help="Seconds that running answers get when the fleet stops.")
    ] = 30
    start_timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds until /health answers, the model's download included."),
    ] = 900.0
    vllm: Annotated[
        str | None, typer.Option(help="The vllm command; default: this environment's, or PATH's.")
    ] = None
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print flags, commands and configuration; start nothing."),
    ] = False
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Write a systemd unit for each server; start nothing.")
    ] = False
    compose: Annotated[
        bool, typer.Option("--compose", help="Write a Compose file of the servers; start nothing.")
    ] = False
    vllm_version: Annotated[
        str | None, typer.Option(help="With --dry-run, --compose: plan for this vLLM, e.g. 0.26.")
    ] = None
    as_json: AsJson = False

    @property
    def on_this_machine(self) -> bool:
        """Return True if no other machine can reach the servers."""
        return self.host in ("127.0.0.1", "::1", "localhost")

    def __post_init__(self) -> None:
        PlacementFlags.__post_init__(self)  # a dataclass with slots has no super() of its own
        if self.cpu and self.gpus is not None:
            raise InputError("--cpu and --gpus: give one of them")
        if self.servers is not None and not self.cpu:
            raise InputError("--servers goes with --cpu; on GPUs there is one on each of --gpus")
        if self.dry_run + self.systemd + self.compose > 1:
            raise InputError("--dry-run, --systemd and --compose: give one of them")
        if self.vllm_version is not None and not (self.dry_run or self.compose):
            raise InputError(
                "--vllm-version goes with --dry-run or --compose; else the installed vLLM runs"
            )
        size = self.kv_cache_memory_bytes
        if size is not None and not re.fullmatch(r"[1-9][0-9]*(\.[0-9]+[kmg]|[kmgKMG]?)", size):
            raise InputError(f"--kv-cache-memory-bytes {size}: give bytes, such as 256M or 4G")
        self._check_words(self.vllm_args or [])

    def _check_words(self, words: list[str]) -> None:
        """Raise InputError for words after `--` that are no flags, or that have an option here."""
        if words and not words[0].startswith("-"):
            raise InputError(f"{words[0]}: only flags of `vllm serve` may follow `--`")
        for flag in (*read_flags(words), *(word.partition("=")[0] for word in words)):
            if flag in FIXED:
                raise InputError(
                    f"{flag} after `--`: the proxy's configuration depends on it; give it before "
                    "the `--`, or --drain for --shutdown-timeout, --no-kv-events for KV events"
                )
