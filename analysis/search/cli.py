"""`forebay search`: parse the options, search, print the sentence and the curve."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.options import (
    BUCKETS,
    ApiKey,
    AsJson,
    AskedModel,
    Buckets,
    Endpoint,
    TimeScale,
    TrafficOptions,
    a_time,
    same_named,
    takes_options,
)
from forebay.traces.ground.command_line.plugins import from_lab
from forebay.traces.ground.errors import InputError

if TYPE_CHECKING:
    from forebay.analysis.search.result import SearchResult
    from forebay.analysis.search.search import SearchQuestion
    from forebay.analysis.search.trial import TrialMaker
    from forebay.replay.plan.slo import Slo
    from forebay.traces.ground.schema import TraceRequest

EXAMPLE = """Find the highest load that meets the targets, with 95 % confidence.

Measures one load after another and extends each until it is decided. The target is a URL, or
sim:MODEL@GPU for simulated engines in virtual time. With --out, a search that was stopped goes on
where it was.

Example:

  forebay search trace.jsonl --target sim:llama-3-8b@h200 --slo ttft=2s --arrivals poisson
"""

SIM_PART, HTTP_PART = 2000, 250
"""Requests of a part: live they cost time, and many small parts decide a load sooner."""
PARTS = 32
REACH = 8.0
"""Times the first load: up to there, a short trace is repeated until a part is long enough."""
MOST_REPEATED = 50_000
SIM_RESOLUTION, HTTP_RESOLUTION = 0.02, 0.05

app = new_app(help=EXAMPLE)


class LabTarget(Protocol):
    """The engine options of a `sim:` target, which the lab defines."""

    def of_model(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        ...

    def trials(self, search: "SearchArguments", slos: "tuple[Slo, ...]") -> "TrialMaker":
        """Return the simulated trials of a search, or raise InputError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchArguments(TrafficOptions):
    """The options of `forebay search` as they are typed."""

    target: Annotated[
        list[str], typer.Option(help="base URL, or sim:MODEL@GPU; round robin over several")
    ]
    attainment: Annotated[
        float, typer.Option(help="share of the requests that must meet their targets")
    ] = 0.99
    resolution: Annotated[
        float | None,
        typer.Option(
            help="distance of neighbouring loads, as a share; default: 0.02, for a URL 0.05"
        ),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(
            min=100, help="fewest requests of a part of a load; default: 2000, for a URL 250"
        ),
    ] = None
    parts: Annotated[int, typer.Option(min=1, help="most parts of a load")] = PARTS
    start: Annotated[
        float | None, typer.Option(help="first load, requests a second; default: the trace's own")
    ] = None
    curve: Annotated[
        str | None,
        typer.Option(help="loads such as 1,2,4: measure a part of each, without a search"),
    ] = None
    out: Annotated[Path | None, typer.Option(help="folder for the trials; needed for a URL")] = None
    gpus: Annotated[int, typer.Option(min=1, help="engines of a sim: target")] = 1
    policy: Annotated[
        str, typer.Option(help="routing policy of a sim: target, or direct (no proxy)")
    ] = "warm_or_least_work"
    config: Annotated[Path | None, typer.Option(help="the proxy's YAML, for a sim: target")] = None
    model: AskedModel = None
    endpoint: Endpoint = "completions"
    time_scale: TimeScale = 1.0
    drain_timeout_s: Annotated[
        float,
        a_time("time for answers after the last arrival", "--drain-timeout"),
    ] = 120.0
    buckets: Buckets = BUCKETS
    api_key: ApiKey = None
    force: Annotated[bool, typer.Option("--force", help="forget the search in --out")] = False
    as_json: AsJson = False

    @property
    def simulated(self) -> bool:
        return self.target[0].startswith("sim:")

    @property
    def part_rows(self) -> int:
        return self.requests or (SIM_PART if self.simulated else HTTP_PART)

    def loads(self) -> list[float]:
        """Return the loads of --curve, ascending, or none (InputError: no loads)."""
        try:
            loads = sorted({float(word) for word in (self.curve or "").split(",") if self.curve})
        except ValueError:
            loads = [0.0]
        if loads and not 0 < loads[0] <= loads[-1] < 1e6:
            raise InputError(f"--curve {self.curve}: give requests a second, such as 1,2,4")
        return loads

    def check(self) -> None:
        """Raise InputError for options that cannot be used together, or out of range."""
        from forebay.replay.plan.schedule import parse_arrivals
        from forebay.replay.plan.target import parse_targets

        if not 0 < self.attainment < 1:
            raise InputError(f"--attainment {self.attainment:g}: give a share such as 0.99")
        if self.resolution is not None and not 0.001 <= self.resolution <= 1:
            raise InputError(f"--resolution {self.resolution:g}: give 0.001 to 1, such as 0.05")
        if self.start is not None and not 0 < self.start < 1e6:
            raise InputError(
                f"--start {self.start:g}: give requests a second, above 0 and below a million"
            )
        if parse_arrivals(self.arrivals).closed:
            raise InputError("--arrivals closed:N: a load needs arrival times; give another")
        if self.simulated:
            if len(self.target) > 1:
                raise InputError("--target: give one sim: target; --gpus sets its engines")
            return
        parse_targets(self.target, ", or sim:MODEL@GPU such as sim:phi-3-mini@h200-nvl")
        if self.out is None:
            raise InputError("--out: a search of a URL keeps its runs; name a folder")

    def question(self, rows: "list[TraceRequest]", slos: "tuple[Slo, ...]") -> "SearchQuestion":
        from forebay.analysis.search.search import SearchQuestion, least_part_s, users_per_load
        from forebay.replay.plan.schedule import parse_arrivals
        from forebay.traces.ground.buckets import bucket_of, parse_buckets

        span_s = rows[-1].arrival_s - rows[0].arrival_s
        loads = self.loads()
        start = (
            self.start
            or max(loads, default=None)
            or ((len(rows) - 1) / span_s if span_s > 0 else None)
        )
        if start is None:
            raise InputError("--start: all requests of this trace arrive at once; give a load")
        # A part must last long enough for the longest target of the buckets in use.
        buckets = parse_buckets(self.buckets)
        names = {bucket_of(row.input_tokens, buckets) or "other" for row in rows}
        least_s = least_part_s(slos, names)
        repeats = parse_arrivals(self.arrivals).kind not in ("trace", "constant")
        used = self._long_enough(rows, start, least_s) if repeats else rows
        question = SearchQuestion(
            used,
            self.attainment,
            self.resolution or (SIM_RESOLUTION if self.simulated else HTTP_RESOLUTION),
            min(self.part_rows, len(used)),
            1 << (self.parts.bit_length() - 1),
            start,
            least_s,
            repeats=repeats,
            users=users_per_load(rows),
            copied=_copied(rows, used),
        )
        # A search that can prove nothing is rejected before it starts. A curve proves nothing.
        if loads:
            return question
        if not question.can_prove():
            raise InputError(f"{self.trace}: {self._too_short(question)}")
        if question.too_short(start):
            raise InputError(
                f"{self.trace}: no load above {len(rows) / least_s:.3g}/s can be proven: its "
                f"{len(rows):,} requests are then over in less than {least_s:g} s (20 times the "
                "longest target); give --arrivals poisson, which repeats its sessions with new "
                "prompts, a longer trace, or a lower --start"
            )
        return question

    def _long_enough(
        self, rows: "list[TraceRequest]", start: float, least_s: float
    ) -> "list[TraceRequest]":
        """Repeat the sessions of a trace that is over before a part is."""
        from forebay.traces.edit.edit import repeated
        from forebay.traces.ground.command_line.messages import talk

        needed = min(MOST_REPEATED, int(REACH * start * least_s) + 1)
        if len(rows) >= needed:
            return rows
        if len(rows) < start * least_s:
            talk(
                f"{self.trace}: its {len(rows):,} requests are over in less than {least_s:g} s (20 "
                "times the longest target): its sessions are repeated, with prompts of their own"
            )
        return repeated(rows, needed)

    def _too_short(self, question: "SearchQuestion") -> str:
        """Give the number of requests for a proof, and the options that change it."""
        have, parts, needed = len(question.rows), question.parts_at(0.0), question.least_part_rows
        larger = f"--requests {needed}" if self.part_rows < needed else ""
        if have < needed:
            larger = f"a trace of {needed:,} or more{' and ' if larger else ''}{larger}"
        more = "more --parts" if question.repeats else "--arrivals poisson (each part at new times)"
        return (
            f"{parts} part{'s' * (parts > 1)} of {question.part_rows:,} requests cannot prove with "
            f"95 % confidence that {self.attainment * 100:g} % meet their targets, even if all do; "
            f"one part of {needed:,} could: give {larger}, {more}, or a lower --attainment"
        )

    def http_trials(self, slos: "tuple[Slo, ...]") -> "TrialMaker":
        """Return trials that replay the trace to the servers."""
        from forebay.analysis.search.trial import HttpTrials
        from forebay.replay.plan.options import ReplayOptions
        from forebay.replay.plan.schedule import parse_arrivals
        from forebay.replay.results.progress import has_screen
        from forebay.traces.ground.buckets import parse_buckets

        assert self.out is not None
        values = {
            "trace": (),
            "targets": tuple(self.target),
            "arrivals": parse_arrivals(self.arrivals),
            "buckets": parse_buckets(self.buckets),
            "slos": slos,
            "force": False,
            "quiet": not has_screen(),
        }
        options = ReplayOptions(**same_named(self, ReplayOptions) | values)
        return HttpTrials(options, self.out, slos)

    def slos(self) -> "tuple[Slo, ...]":
        from forebay.replay.plan.slo import default_slos, parse_slos
        from forebay.traces.ground.buckets import parse_buckets

        buckets = parse_buckets(self.buckets)
        if self.slo is None:
            return default_slos(buckets)
        return parse_slos(self.slo, [bucket.name for bucket in buckets])

    def about(self, sha256: str, flags: dict[str, Any]) -> dict[str, Any]:
        """Return the settings that decide a trial's figures, to compare with an earlier search."""
        named = ("slo", "arrivals", "seed", "requests", "target", "gpus", "policy", "model",
                 "endpoint", "time_scale", "buckets", "too_long")  # fmt: skip
        options = {name: getattr(self, name) for name in named}
        options |= {"requests": self.part_rows, "drain_timeout": self.drain_timeout_s}
        return {"trace_sha256": sha256, "config": str(self.config or ""), "parts": "20 targets",
                **options, **flags}  # fmt: skip


def _copied(rows: "list[TraceRequest]", used: "list[TraceRequest]") -> int:
    """Return the number of rows if copies of them share less than the rows do, else 0."""
    from forebay.traces.edit.sharing import share_prompts

    return len(rows) if len(used) > len(rows) and share_prompts(rows) else 0


HEADINGS = {
    "Target": "target model endpoint api-key time-scale drain-timeout",
    "Simulated target": "gpus policy config tensor-parallel-size quantization kv-cache-dtype "
    "speculative-config acceptance disable-hybrid-kv-cache-manager scheduler-cls "
    "additional-config enable-lora max-loras max-lora-rank",
    "Traffic": "arrivals seed format skip-bad too-long buckets",
    "Search": "slo attainment resolution start requests parts curve",
    "Output": "out force json",
}


@app.command(help=EXAMPLE, headings=HEADINGS)
@takes_options
def search_command(
    arguments: SearchArguments, engines: Annotated[LabTarget, from_lab("sim_target")]
) -> None:
    from forebay.analysis.search.result import result_of
    from forebay.analysis.search.search import LoadSearch
    from forebay.replay.plan.source import TraceSource
    from forebay.traces.ground.command_line.messages import talk

    # Flags of the engine are for simulated ones.
    arguments.check()
    flags = engines.of_model()
    if flags and not arguments.simulated:
        name = next(iter(flags)).replace("_", "-")
        raise InputError(f"--{name}: for a sim: target; a server has its own flags")
    slos = arguments.slos()
    source = TraceSource(
        arguments.trace, format_name=arguments.format_name, skip_bad=arguments.skip_bad
    )
    # Trials come first: a wrong target is then the only error to report.
    simulated = arguments.simulated
    maker = engines.trials(arguments, slos) if simulated else arguments.http_trials(slos)
    question = arguments.question(list(source.requests()), slos)
    searching = LoadSearch(question, maker, arguments.out, talk)
    earlier = searching.resume(arguments.about(source.sha256(), flags), force=arguments.force)
    if earlier:
        talk(f"going on after {earlier} parts of an earlier search in {arguments.out}")
    loads = arguments.loads()
    searching.measure_curve(loads)
    bracket = None if loads else searching.run()
    result = result_of(searching, bracket, [str(slo) for slo in slos])
    origin = ", simulated" if simulated else ""
    show(result, arguments.out, origin, as_json=arguments.as_json)
    if bracket is not None and (result.highest_per_s is None or result.open_ended):
        raise typer.Exit(1)


def show(result: "SearchResult", folder: Path | None, origin: str, *, as_json: bool) -> None:
    from rich.console import Console

    from forebay.analysis.charts.files import plot_files
    from forebay.analysis.search.result import curve_plot, curve_table
    from forebay.analysis.search.search import RESULT
    from forebay.traces.ground.whole_file import json_bytes, whole_file

    data = json_bytes(result.as_json())
    # The folder gets the result even if a terminal shows it too.
    if folder is not None:
        drawn = plot_files("curve", curve_plot(result, origin))
        for name, content in {RESULT: data, **drawn}.items():
            with whole_file(folder / name) as file:
                file.write(content)
    if as_json:
        sys.stdout.write(data.decode())
        return
    # Print the table, the answer, and the number of users that the answer stands for.
    console = Console(highlight=False)
    console.print(curve_table(result))
    console.print(result.sentence)
    if result.users is not None:
        console.print(f"That is about {result.users:,.0f} users or agents within the targets, if "
                      "each keeps the pace of a session of the trace.")  # fmt: skip
    if result.knee_per_s is not None:
        console.print(f"Knee: {result.knee_per_s:g} requests/s, the highest load that the service "
                      "kept up with: it completed at least 95 % as many a second.")  # fmt: skip
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)
