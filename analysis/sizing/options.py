"""The options of `forebay size`. `workload` has the options about the users."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.replay.engine.flags import (
    GpuMemoryUtilization,
    LongPrefillTokenThreshold,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelFlags,
)
from forebay.traces.ground.command_line.options import AsJson, Force
from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    from forebay.analysis.sizing.workload import Users
    from forebay.replay.sim.scenario import Scenario

SEEDS = 3  # fewest seeds of an answer
RESULTS = "results.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeArguments:
    """Every option as typed, with its help and default."""

    model: Annotated[str, typer.Option(help="Model name, or a config.json.")] = "llama-3-8b"
    gpu: Annotated[str, typer.Option(help="GPU of each engine.")] = "h200"
    slo: Annotated[
        str | None,
        typer.Option(
            help="Targets; default: chat.ttft_p95=2s, document.ttft_p95=15s, tpot_p95=100ms."
        ),
    ] = None
    policy: Annotated[
        str, typer.Option(help="Routing policy of the proxy, or direct: no proxy.")
    ] = "warm_or_least_work"
    config: Annotated[Path | None, typer.Option(help="YAML configuration of the proxy.")] = None
    calibration: Annotated[Path | None, typer.Option(help="File with calibrated step times.")] = (
        None
    )
    max_model_len: MaxModelLen = None
    max_num_batched_tokens: MaxNumBatchedTokens = None
    max_num_seqs: MaxNumSeqs = None
    long_prefill_token_threshold: LongPrefillTokenThreshold | None = None
    gpu_memory_utilization: GpuMemoryUtilization = 0.9
    price_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Price of a GPU per hour, in any currency.")
    ] = None
    gpu_watts: Annotated[
        float | None, typer.Option(help="Power of a GPU with its share of the server, watts.")
    ] = None
    seeds: Annotated[int, typer.Option(min=SEEDS, help="Number of seeds.")] = SEEDS
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0
    window: Annotated[
        float | None,
        typer.Option(help="Judged seconds per seed; default: 20 requests beyond each percentile."),
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Skip the what-if searches.")] = False
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Check N and N-1 GPUs with new seeds, 4 times as long."),
    ] = False
    pools: Annotated[
        bool,
        typer.Option("--pools", help="Also size separate pools for prefill and decode."),
    ] = False
    plot: Annotated[
        bool,
        typer.Option("--plot", help="Plot users against GPUs; one search per point (minutes)."),
    ] = False
    plot_tokens: Annotated[
        str | None,
        typer.Option(help="Document sizes of the plot; default: 1/4, 1/2 and all of the length."),
    ] = None
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for results.json and plot.svg.")
    ] = None
    force: Force = False
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2
    as_json: AsJson = False

    def check(self) -> None:
        """Raise InputError for values that need no simulation to be rejected."""
        for option, number in (
            ("--price-per-gpu-hour", self.price_per_gpu_hour),
            ("--gpu-watts", self.gpu_watts),
            ("--window", self.window),
        ):
            if number is not None and not 0 < number < float("inf"):
                raise InputError(f"{option} {number:g}: give more than 0")
        if self.out is None:
            if self.plot:
                raise InputError("--plot: give the folder for plot.svg with --out")
            return
        if self.out.exists() and not self.out.is_dir():
            raise InputError(f"--out {self.out}: is a file; give a folder")
        for name in (RESULTS, "plot.svg", "plot.png"):
            if (self.out / name).exists() and not self.force:
                raise InputError(
                    f"--out {self.out}: holds {name}; name another folder, or give --force"
                )

    def plot_sizes(self, users: "Users") -> list[int]:
        """Document sizes of the plot's curves. Raises InputError."""
        from forebay.traces.synth.lengths import Fixed

        if self.plot_tokens is None:
            length = users.document_tokens
            if not isinstance(length, Fixed):
                raise InputError("--plot: --document-tokens is a distribution; give --plot-tokens")
            return sorted({max(1, length.tokens // part) for part in (4, 2, 1)})
        try:
            sizes = [int(part) for part in self.plot_tokens.split(",")]
        except ValueError:
            sizes = []
        if not sizes or min(sizes) < 1:
            raise InputError(
                f"--plot-tokens {self.plot_tokens}: give tokens, such as 16000,32000,100000"
            )
        return sizes

    def check_memory(self, users: "Users", sizes: list[int], flags: ModelFlags) -> None:
        """Raise InputError if the longest request, or one in the plot, does not fit a server."""
        from forebay.analysis.sizing.floor import check_memory
        from forebay.traces.synth.lengths import Fixed

        options = {**self._engine_options(), "max_model_len": self.max_model_len}
        options |= flags.placement()
        check_memory(users, **options)
        for tokens in sizes:
            longer = replace(users, document_tokens=Fixed(tokens))
            check_memory(longer, named=f"--plot-tokens {tokens}", **options)

    def scenario(self, flags: ModelFlags) -> "Scenario":
        """One engine behind the proxy. The search sets the number of engines."""
        from forebay.replay.engine.config import EngineConfig
        from forebay.replay.sim.cli import proxy_config
        from forebay.replay.sim.scenario import Scenario, flags_of

        proxy = proxy_config(self.config)
        stated = flags_of(proxy)
        if self.long_prefill_token_threshold is not None:
            stated["long_prefill_token_threshold"] = self.long_prefill_token_threshold
        engine = EngineConfig(
            max_model_len=self.max_model_len,
            calibration=self.calibration,
            **{**stated, **self._engine_options(), **flags.of_model()},
        )
        return Scenario(engine, 1, self.policy, proxy)

    def _engine_options(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "gpu": self.gpu,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }
