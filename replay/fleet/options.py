"""The options of `forebay fleet up`, with their help texts and defaults."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.replay.fleet.plan import FleetOptions
from forebay.traces.command_line.options import AsJson, same_named
from forebay.traces.errors import InputError

DIR = Path("runs/fleet")
Folder = Annotated[
    Path, typer.Option("--dir", help="Folder of state, logs and the proxy's configuration.")
]


@dataclass(frozen=True, slots=True)
class UpOptions:
    """One option of the command for each field."""

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
    config: Annotated[
        Path | None,
        typer.Option(help="Proxy configuration to extend."),
    ] = None
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
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest context, tokens; default: the model's.")
    ] = None
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Most requests in a step; default: by the KV cache.")
    ] = None
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that vLLM uses.")
    ] = 0.9
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
    cache_root: Annotated[
        Path | None,
        typer.Option(
            help="Folder of compiled graphs; default: VLLM_CACHE_ROOT, ~/.cache/forebay/vllm."
        ),
    ] = None
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
    gpu: Annotated[
        str, typer.Option(help="With --dry-run on a machine without a GPU: plan for this one.")
    ] = "h200"
    vllm_version: Annotated[
        str | None, typer.Option(help="With --dry-run, --compose: plan for this vLLM, e.g. 0.26.")
    ] = None
    as_json: AsJson = False

    def check(self) -> None:
        """Raise InputError for options that contradict each other."""
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

    def fleet(self) -> FleetOptions:
        """Return the options that the plan of the servers follows from."""
        environment = os.environ.get("VLLM_CACHE_ROOT")
        values = {
            "utilization": self.gpu_memory_utilization,
            "kv_memory": self.kv_cache_memory_bytes,
            "drain_s": self.drain,
            "cache_root": self.cache_root or (Path(environment) if environment else None),
            "vllm_args": tuple(self.vllm_args or ()),
        }
        return FleetOptions(**same_named(self, FleetOptions) | values)
