"""The command `forebay size`: parse, search, print."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from forebay.analysis.sizing.options import RESULTS, SizeArguments
from forebay.analysis.sizing.workload import Users
from forebay.replay.engine.flags import ModelFlags
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.command_line.options import takes_options

if TYPE_CHECKING:
    from forebay.analysis.charts.users_and_gpus import Curve
    from forebay.analysis.sizing.guide import LeastPools, SizingAnswer, Validation
    from forebay.analysis.sizing.judge import FleetJudgement
    from forebay.analysis.sizing.search import Question
    from forebay.analysis.sizing.targets import NotMet

HELP = """Find the least number of GPUs that meets latency targets, by simulating the proxy and its
engines under the traffic of that many users. The answer holds for the worst of at least 3 seeds.
With --tensor-parallel-size, each engine has that many GPUs.

--slo takes [BUCKET.]METRIC_pNN=TIME. BUCKET is chat or document. METRIC is ttft, tpot, e2e or stall
(the longest gap in an answer). itl is judged as stall, which is stricter. Rejected requests miss.
Against three runs on an H200 the p99 of stall was 13 to 41 % too short, where some tokens had no
text. Each of them joins two gaps.

Example:

  forebay size --model llama-3-8b --gpu h200 --users 500 --document-tokens 100000

  forebay size --users 100 --document-tokens 32000 --shared 0.8 --documents 50
  --slo chat.ttft_p95=2s,document.ttft_p95=15s,tpot_p95=100ms
"""

app = new_app(help=HELP)


HEADINGS = {
    "Users": "users document-tokens think document-share shared documents zipf cv question-tokens "
    "document-output-tokens chat-tokens chat-output-tokens",
    "Fleet": "model gpu tensor-parallel-size quantization kv-cache-dtype speculative-config "
    "acceptance disable-hybrid-kv-cache-manager scheduler-cls additional-config enable-lora "
    "max-loras max-lora-rank policy config calibration max-model-len max-num-batched-tokens "
    "max-num-seqs long-prefill-token-threshold gpu-memory-utilization price-per-gpu-hour gpu-watts",
    "Search": "slo seeds seed window quick validate pools jobs",
    "Output": "plot plot-tokens out force json",
}


@app.command(help=HELP, headings=HEADINGS)
@takes_options
def size_command(users: Users, arguments: SizeArguments, flags: ModelFlags) -> None:
    from forebay.analysis.sizing.workers import workers

    # Read the question, and reject one whose simulations need more memory than there is.
    arguments.check()
    with workers(arguments.jobs, "forebay.analysis.sizing.guide") as run:
        from forebay.analysis.sizing.guide import curves, least_pools, question_of, size, validate
        from forebay.analysis.sizing.targets import NotMet, default_targets, parse_targets

        targets = default_targets(users) if arguments.slo is None else parse_targets(arguments.slo)
        sizes = arguments.plot_sizes(users) if arguments.plot else []
        arguments.check_memory(users, sizes, flags)  # now, because the search takes minutes
        scenario = arguments.scenario(flags)
        if arguments.pools:
            replace(scenario, gpus=2, pools=(1, 1))  # now, too: not every engine can be in a pool
        # Search the smallest fleet. Pools can meet what no number of alike engines meets.
        question, guess, most = question_of(
            users, scenario, targets, arguments.window, arguments.seed
        )
        seeds = range(arguments.seed, arguments.seed + arguments.seeds)
        mixed: SizingAnswer | NotMet
        try:
            mixed = size(question, guess, most, run, seeds=seeds, varied=not arguments.quick)
            checked = validate(mixed, run) if arguments.validate else None
        except NotMet as error:
            if not arguments.pools:
                raise
            mixed, checked = error, None
        pooled = least_pools(question, seeds, mixed, guess, run) if arguments.pools else None
        # The plot repeats the search for other document lengths.
        drawn = (
            curves(users, scenario, targets, run, sizes=sizes, seed=arguments.seed) if sizes else []
        )
    _show(arguments, question, seeds, mixed, checked, pooled, drawn)


def _show(
    arguments: SizeArguments,
    question: "Question",
    seeds: Sequence[int],
    mixed: "SizingAnswer | NotMet",
    checked: "Validation | None",
    pooled: "LeastPools | None",
    drawn: "Sequence[Curve]",
) -> None:
    """Write the files, and print the answer as data or as text."""
    from forebay.analysis.charts.files import plot_files
    from forebay.analysis.charts.users_and_gpus import draw
    from forebay.analysis.sizing.report import (
        as_json,
        cost,
        pools_json,
        pools_lines,
        print_answer,
        provenance,
    )
    from forebay.analysis.sizing.targets import NotMet
    from forebay.replay.results.folder import make_folder
    from forebay.traces.ground.whole_file import json_bytes, whole_file

    # The figures.
    origin = provenance(question, seeds, shlex.join(["forebay", "size", *_words()]))
    rates = arguments.price_per_gpu_hour, arguments.gpu_watts
    alike: Sequence[FleetJudgement] = ()
    if isinstance(mixed, NotMet):
        data = {"recommended_gpus": None, "not_met": str(mixed), "cost": None, **origin}
    else:
        alike = mixed.around[mixed.gpus]
        data = as_json(mixed, origin, cost(question, alike, *rates), checked)
    pools = []
    if arguments.pools:
        pools_price = cost(question, pooled.judged, *rates) if pooled else None
        data["pools"] = pools_json(pooled, pools_price)
        pools = pools_lines(question, alike, pooled, pools_price)
    if drawn:
        data["plot"] = [
            {"document_tokens": c.document_tokens, "points": c.points, "refused": c.error}
            for c in drawn
        ]
    # The files, and the answer.
    if arguments.out is not None:
        files = {RESULTS: json_bytes(data)}
        if drawn:
            engine = question.scenario.engine
            label = f"Users against GPUs, {engine.model_spec.name} on {engine.gpu_spec.name}"
            files |= plot_files("plot", draw(drawn, label))
        make_folder(arguments.out)
        for name, content in files.items():
            with whole_file(arguments.out / name) as file:
                file.write(content)
        talk(f"wrote {arguments.out}")
    if arguments.as_json:
        print_json(data)
    elif isinstance(mixed, NotMet):
        unit = question.unit
        print(f"no number of {unit}s that both prefill and decode meets the targets: {mixed}")
        print(*pools, sep="\n")
    else:
        from rich.console import Console

        print_answer(mixed, origin, data["cost"], checked, pools, Console(highlight=False))


def _words() -> list[str]:
    words = sys.argv[1:]
    return words[1:] if words[:1] == ["size"] else words
