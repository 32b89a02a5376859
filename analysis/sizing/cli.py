"""The word `forebay size`: parse, search, print."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.proxy.command import new_app
from forebay.traces.errors import InputError

if TYPE_CHECKING:
    from forebay.traces.lengths import Length

HELP = """The least number of GPUs that meets latency targets, found by simulating the proxy and
its engines over the traffic of so many users. At least three seeds; the worst one counts.

--slo takes [CLASS.]METRIC_pNN=TIME: CLASS is chat or document, METRIC ttft, tpot, e2e or stall
(the longest gap of an answer; itl means this too, which is stricter). Refused requests miss.

Example:

  forebay size --model llama-3-8b --gpu h200 --users 500 --document-tokens 100000

  forebay size --users 100 --document-tokens 32000 --shared 0.8 --documents 50
  --slo chat.ttft_p95=2s,document.ttft_p95=10s,tpot_p95=100ms
"""
SEEDS = 3  # at least
RESULTS, PLOT = "results.json", "plot.svg"

app = new_app(help=HELP)


@app.command(help=HELP)
def size_command(
    users: Annotated[int, typer.Option(help="How many people ask.")],
    document_tokens: Annotated[str, typer.Option(help="Length of a document, or a distribution.")],
    model: Annotated[str, typer.Option(help="Name, or a config.json.")] = "llama-3-8b",
    gpu: Annotated[str, typer.Option(help="GPU of each engine.")] = "h200",
    slo: Annotated[
        str | None,
        typer.Option(help="[default: chat.ttft_p95=2s,document.ttft_p95=10s,tpot_p95=100ms]"),
    ] = None,
    think: Annotated[float, typer.Option(help="Seconds between two questions of a user.")] = 60.0,
    document_share: Annotated[
        float, typer.Option(help="Share of questions that carry a document.")
    ] = 0.3,
    shared: Annotated[
        float, typer.Option(help="Share of these about common documents (Zipf popularity).")
    ] = 0.0,
    documents: Annotated[int, typer.Option(help="How many common documents.")] = 50,
    zipf: Annotated[float, typer.Option(help="Exponent of their popularity; 0: even.")] = 0.8,
    cv: Annotated[float, typer.Option(help="Variation of arrival gaps; 1: Poisson.")] = 1.0,
    question_tokens: Annotated[str, typer.Option(help="Question about a document.")] = "64",
    document_output_tokens: Annotated[str, typer.Option(help="Answer about a document.")] = "128",
    chat_tokens: Annotated[str, typer.Option(help="Prompt without document.")] = "azure-conv-input",
    chat_output_tokens: Annotated[
        str, typer.Option(help="Answer without document.")
    ] = "azure-conv-output",
    policy: Annotated[
        str, typer.Option(help="Routing policy of the proxy, or direct: no proxy.")
    ] = "warm_or_least_work",
    config: Annotated[Path | None, typer.Option(help="The proxy's YAML.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Step-time constants.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="As of vllm serve.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="As of vllm serve.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="As of vllm serve.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="As of vllm serve.")] = 0.9,
    price_per_gpu_hour: Annotated[float | None, typer.Option(help="In any currency.")] = None,
    seeds: Annotated[int, typer.Option(min=SEEDS, help="How many seeds.")] = SEEDS,
    seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    window: Annotated[
        float | None, typer.Option(help="Seconds judged a seed.  [default: 20 beyond a percentile]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the what-ifs.")] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Replay fresh seeds, four times as long, at N, N-1.")
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Users against GPUs; a search a point (minutes).")
    ] = False,
    plot_tokens: Annotated[
        str | None, typer.Option(help="Its document sizes.  [default: 1/4, 1/2 and all of it]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for results.json and plot.svg.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the files in --out.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
) -> None:
    from forebay.analysis.sizing.workers import workers

    _check(out, plot=plot, force=force)
    for option, number in (("--price-per-gpu-hour", price_per_gpu_hour), ("--window", window)):
        if number is not None and not 0 < number < float("inf"):
            raise InputError(f"{option} {number:g}: give more than 0")
    with workers(jobs, "forebay.analysis.sizing.guide") as run:
        from forebay.analysis.sizing.floor import check_memory
        from forebay.analysis.sizing.guide import size
        from forebay.analysis.sizing.guide import validate as replay
        from forebay.analysis.sizing.plot import curves, draw
        from forebay.analysis.sizing.report import as_json as answer_json
        from forebay.analysis.sizing.report import cost, print_answer, provenance
        from forebay.analysis.sizing.targets import default_targets, parse_targets
        from forebay.analysis.sizing.workload import Users
        from forebay.proxy.config.schema import Config
        from forebay.proxy.config.sources import load_config
        from forebay.replay.engine.config import EngineConfig
        from forebay.replay.sim.scenario import Scenario
        from forebay.traces.lengths import Fixed, parse_length

        people = Users(
            users=users,
            think_s=think,
            document_share=document_share,
            document_tokens=parse_length(document_tokens, "--document-tokens"),
            question_tokens=parse_length(question_tokens, "--question-tokens"),
            document_output_tokens=parse_length(document_output_tokens, "--document-output-tokens"),
            chat_tokens=parse_length(chat_tokens, "--chat-tokens"),
            chat_output_tokens=parse_length(chat_output_tokens, "--chat-output-tokens"),
            shared=shared,
            documents=documents,
            zipf_s=zipf,
            cv=cv,
        )
        targets = default_targets(people) if slo is None else parse_targets(slo)
        engine_options: dict[str, Any] = {
            "model": model,
            "gpu": gpu,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "gpu_memory_utilization": gpu_memory_utilization,
        }
        check_memory(people, max_model_len=max_model_len, **engine_options)
        sizes = _sizes(plot_tokens, people.document_tokens) if plot else []
        for tokens in sizes:  # before the search, which takes minutes
            check_memory(
                replace(people, document_tokens=Fixed(tokens)),
                named=f"--plot-tokens {tokens}",
                max_model_len=max_model_len,
                **engine_options,
            )
        engine = EngineConfig(
            max_model_len=max_model_len, calibration=calibration, **engine_options
        )
        proxy = Config() if config is None else load_config(config, {}, {})
        scenario = Scenario(engine, 1, policy, proxy)
        answer = size(
            people,
            scenario,
            targets,
            run,
            seeds=range(seed, seed + seeds),
            window_s=window,
            sensitivity=not quick,
        )
        checked = replay(answer, run) if validate else None
        drawn = curves(people, scenario, targets, run, sizes=sizes, seed=seed) if plot else []
    origin = provenance(answer, shlex.join(["forebay", "size", *_words()]))
    price = cost(answer, price_per_gpu_hour)
    data = answer_json(answer, origin, price, checked)
    if drawn:
        data["plot"] = [
            {"document_tokens": c.document_tokens, "points": c.points, "refused": c.refused}
            for c in drawn
        ]
    if out is not None:
        _write(out / RESULTS, _encoded(data))
        if drawn:
            label = f"Users against GPUs, {engine.model_spec.name} on {engine.gpu_spec.name}"
            _write(out / PLOT, draw(drawn, label).encode())
        print(f"wrote {out}", file=sys.stderr)
    if as_json:
        sys.stdout.write(_encoded(data).decode())
        return
    from rich.console import Console

    print_answer(answer, origin, price, checked, Console(highlight=False))


def _words() -> list[str]:
    words = sys.argv[1:]
    return words[1:] if words[:1] == ["size"] else words


def _sizes(text: str | None, length: "Length") -> list[int]:
    from forebay.traces.lengths import Fixed

    if text is None:
        if not isinstance(length, Fixed):
            raise InputError("--plot: --document-tokens is a distribution; give --plot-tokens")
        return sorted({max(1, length.tokens // part) for part in (4, 2, 1)})
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InputError(f"--plot-tokens {text}: give tokens, such as 16000,32000,100000")
    return sizes


def _check(out: Path | None, *, plot: bool, force: bool) -> None:
    if out is None:
        if plot:
            raise InputError("--plot: give the folder for plot.svg with --out")
        return
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: is a file; name a folder")
    for name in (RESULTS, PLOT):
        if (out / name).exists() and not force:
            raise InputError(f"--out {out}: holds {name}; name another folder, or give --force")


def _encoded(data: dict[str, Any]) -> bytes:
    import orjson

    return orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"--out {path.parent}: cannot be written ({error.strerror})") from error
