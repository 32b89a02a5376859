"""The command `forebay size`: parse, search, print."""

import shlex
import sys
from dataclasses import replace

from forebay.analysis.sizing.options import RESULTS, SizeArguments
from forebay.replay.engine.flags import ModelFlags
from forebay.traces.ground.command_line.command import new_app
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.command_line.options import takes_options

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
def size_command(arguments: SizeArguments, flags: ModelFlags) -> None:
    from forebay.analysis.sizing.workers import workers

    # Read the question, and reject one whose simulations need more memory than there is.
    arguments.check()
    with workers(arguments.jobs, "forebay.analysis.sizing.guide") as run:
        from forebay.analysis.charts.files import plot_files
        from forebay.analysis.charts.users_and_gpus import draw
        from forebay.analysis.sizing.guide import curves, least_pools, size, validate
        from forebay.analysis.sizing.report import (
            as_json,
            cost,
            pools_json,
            pools_lines,
            print_answer,
            provenance,
        )
        from forebay.analysis.sizing.targets import default_targets, parse_targets

        users = arguments.population()
        targets = default_targets(users) if arguments.slo is None else parse_targets(arguments.slo)
        sizes = arguments.plot_sizes(users) if arguments.plot else []
        arguments.check_memory(users, sizes, flags)  # now, because the search takes minutes
        scenario = arguments.scenario(flags)
        if arguments.pools:
            replace(scenario, gpus=2, pools=(1, 1))  # now, too: not every engine can be in a pool
        # Search the smallest fleet. The plot repeats that for other document lengths.
        answer = size(
            users,
            scenario,
            targets,
            run,
            seeds=range(arguments.seed, arguments.seed + arguments.seeds),
            window_s=arguments.window,
            sensitivity=not arguments.quick,
        )
        checked = validate(answer, run) if arguments.validate else None
        pooled = least_pools(answer, run) if arguments.pools else None
        drawn = (
            curves(users, scenario, targets, run, sizes=sizes, seed=arguments.seed) if sizes else []
        )
    from forebay.replay.results.folder import make_folder
    from forebay.traces.ground.whole_file import json_bytes, whole_file

    # Write the files, and print the answer as data or as text.
    origin = provenance(answer, shlex.join(["forebay", "size", *_words()]))
    rates = arguments.price_per_gpu_hour, arguments.gpu_watts
    price = cost(answer, answer.around[answer.gpus], *rates)
    data = as_json(answer, origin, price, checked)
    pools = []
    if arguments.pools:
        pools_price = cost(answer, pooled.judged, *rates) if pooled else None
        data["pools"] = pools_json(pooled, pools_price)
        pools = pools_lines(answer, pooled, pools_price)
    if drawn:
        data["plot"] = [
            {"document_tokens": c.document_tokens, "points": c.points, "refused": c.error}
            for c in drawn
        ]
    if arguments.out is not None:
        files = {RESULTS: json_bytes(data)}
        if drawn:
            engine = scenario.engine
            label = f"Users against GPUs, {engine.model_spec.name} on {engine.gpu_spec.name}"
            files |= plot_files("plot", draw(drawn, label))
        make_folder(arguments.out)
        for name, content in files.items():
            with whole_file(arguments.out / name) as file:
                file.write(content)
        talk(f"wrote {arguments.out}")
    if arguments.as_json:
        print_json(data)
        return
    from rich.console import Console

    print_answer(answer, origin, price, checked, pools, Console(highlight=False))


def _words() -> list[str]:
    words = sys.argv[1:]
    return words[1:] if words[:1] == ["size"] else words
