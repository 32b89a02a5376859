"""Print the result of `size` on a terminal, or as JSON."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from forebay.analysis.sizing.binding import closest
from forebay.analysis.sizing.guide import (
    LeastPools,
    SizingAnswer,
    Validation,
    sharing_takes_minutes,
)
from forebay.analysis.sizing.judge import FleetJudgement
from forebay.analysis.sizing.search import Question
from forebay.analysis.statistics.intervals import wilson
from forebay.analysis.statistics.units import numbered
from forebay.replay.engine.flags import changed_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HOURS_A_MONTH = 730.0
HOUR_S = 3600.0
NOT_SIMULATED = (
    "not simulated: all documents shared. With layers that keep part of a context it takes minutes."
    " Ask with --shared 1."
)


def _fleet(answer: SizingAnswer) -> str:
    """Name the servers and their GPUs."""
    gpu, each = answer.question.scenario.engine.gpu_spec.name, answer.question.gpus_per_server
    if each == 1:
        return f"{answer.gpus} x {gpu}"
    return f"{numbered(answer.gpus, 'server')} of {each} x {gpu} ({answer.gpus * each} GPUs)"


def provenance(question: Question, seeds: Sequence[int], command: str) -> dict[str, Any]:
    """The settings that repeat an answer, and the source of its step times."""
    engine = question.scenario.engine
    model, gpu = engine.model_spec.name, engine.gpu_spec.name
    file = engine.calibration_file()
    return {
        "command": command,
        "seeds": list(seeds),
        "versions": {"forebay": version("forebay"), "python": platform.python_version()},
        "engine": f"simulated vLLM {engine.vllm_version}",
        "calibration": {
            "model": file.model,
            "gpu": file.gpu,
            "for": f"{model} on {gpu}",
            "exact": file.gpu == gpu and file.model == model,
            "known_error": engine.known_error(),
            "remark": engine.constants_remark(),
            "checked": engine.how_checked(),
            "source": file.source,
        },
    }


def cost(
    question: Question,
    judged: Sequence[FleetJudgement],
    price_per_gpu_hour: float | None,
    gpu_watts: float | None = None,
) -> dict[str, float] | None:
    """Price and energy of the GPUs of a judged fleet, one spare included.

    `per_busy_gpu_hour` is the price for each GPU that computes, on average. None without a price
    and watts.
    """
    figures: dict[str, float] = {}
    users, tokens_per_s = question.users, question.users.output_tokens_per_s()
    paid = question.paid_gpus(judged[0].gpus)
    if price_per_gpu_hour is not None:
        hourly = price_per_gpu_hour * paid
        busy = _busy(judged) * judged[0].gpus * question.gpus_per_server
        figures = {
            "price_per_gpu_hour": price_per_gpu_hour,
            "per_hour": hourly,
            "per_month": hourly * HOURS_A_MONTH,
            "per_busy_gpu_hour": hourly / busy,
            "per_request": hourly / (users.rate_per_s * HOUR_S),
            "per_million_output_tokens": hourly * 1e6 / (tokens_per_s * HOUR_S),
        }
    if gpu_watts is not None:
        figures["gpu_watts"] = gpu_watts
        figures["joules_per_output_token"] = gpu_watts * paid / tokens_per_s
    return figures or None


def _busy(judged: Sequence[FleetJudgement]) -> float:
    """Return the share of time that an engine works, over all seeds."""
    return fmean(judgement.busy for judgement in judged)


def pools_json(pooled: LeastPools | None, price: dict[str, float] | None) -> dict[str, Any]:
    """The fleet in pools as plain data. null: no number of engines is enough."""
    return {
        "prefill": pooled and pooled.prefill,
        "decode": pooled and pooled.decode,
        "busy": pooled and _busy(pooled.judged),
        "cost": price,
    }


def pools_lines(
    question: Question,
    alike: Sequence[FleetJudgement],
    pooled: LeastPools | None,
    price: dict[str, float] | None,
) -> list[str]:
    """Describe the separate pools of prefill and decode engines for the same targets.

    Args:
        alike: judgements of the fewest engines that do both. Empty: no number of them is enough.
    """
    link, unit = question.scenario.kv_link.bytes_per_s / 1e9, question.unit
    before = f"in pools, keys and values moving at {link:g} GB/s:"
    if pooled is None:
        return [f"{before} {numbered(2 * alike[0].gpus, unit)} do not meet the targets either"]
    instead = f"instead of {alike[0].gpus}" if alike else "in all"
    than = f" instead of {_busy(alike):.0%}" if alike else ""
    return [
        f"{before} {numbered(pooled.prefill, unit)} for prefills and {pooled.decode} for decodes, "
        f"{pooled.engines} {instead}, busy {_busy(pooled.judged):.0%} of the time{than}",
        *_cost_lines(question, pooled.engines, price or {}),
    ]


def as_json(
    answer: SizingAnswer,
    origin: dict[str, Any],
    price: dict[str, float] | None,
    check: Validation | None,
) -> dict[str, Any]:
    """All figures of the terminal as plain data. null stands for 'never'."""
    return {
        "recommended_gpus": answer.gpus * answer.question.gpus_per_server,
        "with_one_spare": answer.question.paid_gpus(answer.gpus),
        "servers": answer.gpus,
        "gpus_per_server": answer.question.gpus_per_server,
        "gpus_by_seed": {"low": answer.range[0], "high": answer.range[1]},
        "binding": answer.binding,
        "closest": None if answer.binding else closest(answer.around[answer.gpus][0].usage),
        "around": {str(count): [_judged(j) for j in js] for count, js in answer.around.items()},
        "formulas": answer.naive,
        "sensitivity": {
            "seed": answer.seeds[0],
            "nothing_changed": answer.base,
            "gpus": answer.variants,
        },
        "window_s": {
            part: getattr(answer.question.window, f"{part}_s")
            for part in ("warmup", "judged", "cooldown")
        },
        "cost": price,
        "validation": check
        and {
            "judged_s": check.window.judged_s,
            "one_fewer": [_judged(judgement) for judgement in check.fewer],
            "recommended": [_judged(judgement) for judgement in check.recommended],
        },
        **origin,
    }


def _judged(judgement: FleetJudgement) -> dict[str, Any]:
    return {
        "seed": judgement.seed,
        "met": judgement.met,
        "targets": {
            str(a.target): {"share": a.share, "count": a.count, "percentile_s": _finite(a.value_s)}
            for a in judgement.attained
        },
        "classes": {
            kind: {
                "count": c.count,
                "refused": c.rejected,
                **{f"ttft_{p}": _finite(getattr(c, p)) for p in ("p50_s", "p95_s", "p99_s")},
            }
            for kind, c in judgement.classes.items()
        },
        "tpot_p95_s": _finite(judgement.tpot_p95_s),
        "busy": judgement.busy,
        "prefill_part": judgement.usage.prefill_part,
        "kv_mean": judgement.usage.kv_mean,
        "kv_peak": judgement.usage.kv_peak,
        "slots_peak": judgement.usage.seats_peak,
        "hit_ratio": judgement.hit_ratio,
        "preemptions": judgement.preemptions,
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _cost_lines(question: Question, engines: int, price: dict[str, float]) -> list[str]:
    lines = []
    if "per_hour" in price:
        lines.append(
            f"cost of {numbered(question.paid_gpus(engines), 'GPU')}: {price['per_hour']:,.2f} per "
            f"hour, {price['per_month']:,.0f} per month of {HOURS_A_MONTH:g} h, "
            f"{price['per_busy_gpu_hour']:.2f} per hour of a GPU that computes, "
            f"{price['per_request']:.4g} per request, "
            f"{price['per_million_output_tokens']:,.2f} per million output tokens"
        )
    if "gpu_watts" in price:
        lines.append(
            f"energy at {price['gpu_watts']:g} W a GPU: {price['joules_per_output_token']:,.2f} J "
            "per output token"
        )
    return lines


def print_answer(
    answer: SizingAnswer,
    origin: dict[str, Any],
    price: dict[str, float] | None,
    check: Validation | None,
    pools: Sequence[str],
    console: "Console",
) -> None:
    from rich.text import Text

    def show(lines: Sequence[str], style: str = "") -> None:
        for line in lines:
            console.print(Text(line, style=style))

    engine, users = answer.question.scenario.engine, answer.question.users
    targets = answer.question.targets
    low, high = answer.range
    spread = f"{low}" if low == high else f"{low} to {high}"
    error = engine.known_error()
    flags = ", ".join(changed_words(engine)) or "vLLM's default flags"
    title = (
        f"{_fleet(answer)} for {engine.model_spec.name}, {flags}; "
        f"{answer.gpus + 1} to survive the loss of one{f'; {error}' if error else ''}"
    )
    show([title], "bold")
    # The answer's terms: traffic, targets, certainty and the scarce resource.
    scarce, at = answer.binding, answer.around[answer.gpus][0].usage
    lines = [
        f"{users.users:,} users, each with a question every {users.think_s:g} s, "
        f"{users.document_share:.0%} with a document, {users.shared:.0%} of those shared",
        f"targets: {', '.join(str(target) for target in targets)}",
        f"least count by seed: {spread} ({len(answer.seeds)} seeds); the worst seed decides; "
        f"if one of {answer.gpus + 1} fails, the other {answer.gpus} still meet the targets",
        f"scarce resource: {f'{scarce.resource}: {scarce.why}' if scarce else closest(at)}",
    ]
    show([*lines, *_cost_lines(answer.question, answer.gpus, price or {}), *pools])
    console.print(_around_table(answer))
    show(_certainty(answer))
    console.print(_naive_table(answer))
    if answer.variants:
        console.print(_variants_table(answer))
        if sharing_takes_minutes(answer.question):
            show([NOT_SIMULATED])
    if check:
        show(validation_lines(check, answer.question.unit))
    # The last lines name the source of the step times, and repeat the answer.
    calibration = origin["calibration"]
    remark, source = calibration["remark"] or "", f"measured on {calibration['gpu']}"
    words = remark if source in remark else "; ".join(filter(None, (source, remark)))
    show(
        [
            f"step times: {words} (details: --json)",
            f"{origin['command']}   seeds {', '.join(map(str, answer.seeds))}; "
            f"forebay {origin['versions']['forebay']}, Python {origin['versions']['python']}, "
            f"{origin['engine']}",
        ],
        "dim",
    )


def _table(title: str, *headings: str, no_wrap: bool = False) -> "Table":
    """Make a table whose first column has text, and the others figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(title, no_wrap=no_wrap)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _around_table(answer: SizingAnswer) -> "Table":
    names = {-1: "N-1", 0: "N", 1: "N+1"}
    table = _table(
        f"worst of {numbered(len(answer.seeds), 'seed')}",
        *(
            f"{names[count - answer.gpus]}: {numbered(count, answer.question.unit)}"
            for count in answer.around
        ),
        no_wrap=True,
    )
    # All columns have the same labels.
    columns = [_figures(answer, judged) for judged in answer.around.values()]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    return table


def _figures(answer: SizingAnswer, judged: list[FleetJudgement]) -> dict[str, str]:
    """Return the figures of one count of servers, by label."""
    figures = {"seeds that met all targets": f"{sum(j.met for j in judged)} of {len(judged)}"}
    for which, target in enumerate(answer.question.targets):
        worst = min((j.attained[which] for j in judged), key=lambda attained: attained.share or 0.0)
        figures[f"within {target}"] = worst.shown
    # The worst seed decides, so percentiles are the maximum over the seeds.
    for kind in answer.around[answer.gpus][0].classes:
        for mark in ("p50", "p95", "p99"):
            worst_s = max(getattr(j.classes[kind], f"{mark}_s") for j in judged)
            figures[f"{kind} TTFT {mark}, s"] = _shown(worst_s)
    # Times over all seeds end the table.
    return figures | {
        "TPOT p95, ms": _shown(max(j.tpot_p95_s for j in judged) * 1e3),
        "rejected, all seeds": f"{sum(j.rejected for j in judged):,}",
        "busy, mean": f"{_busy(judged):.0%}",
        "KV cache in use, mean": f"{fmean(j.usage.kv_mean for j in judged):.0%}",
        "prompt tokens cached": f"{fmean(j.hit_ratio for j in judged):.0%}",
    }


def _shown(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "never"


def _certainty(answer: SizingAnswer) -> list[str]:
    intervals = []
    # The seeds' results of one target after another.
    for seeds in zip(*(judged.attained for judged in answer.around[answer.gpus]), strict=True):
        count = sum(attained.count for attained in seeds)
        low, high = wilson(sum(attained.good for attained in seeds), count)
        intervals.append(f"{seeds[0].target.name} {count:,} requests, {low:.1%} to {high:.1%}")
    window = answer.question.window
    return [
        f"at {numbered(answer.gpus, answer.question.unit)}, share within target over all seeds, "
        f"95 % interval (Wilson): {'; '.join(intervals)}",
        f"each seed: {window.judged_s:,.0f} s judged after {window.warmup_s:,.0f} s of warm-up",
    ]


def _naive_table(answer: SizingAnswer) -> "Table":
    table = _table("formula", f"{answer.question.unit}s", no_wrap=True)
    table.add_column("why it differs from the simulation", overflow="fold")
    for formula in answer.naive:
        table.add_row(formula.name, "-" if formula.gpus is None else str(formula.gpus), formula.why)
    return table


def _variants_table(answer: SizingAnswer) -> "Table":
    title = f"what if (seed {answer.seeds[0]} only; unchanged: {answer.base})"
    table = _table(title, f"{answer.question.unit}s", "change")
    for what, gpus in answer.variants.items():
        cells = ("not met", "") if gpus is None else (str(gpus), f"{gpus - answer.base:+d}")
        table.add_row(what, *cells)
    return table


def validation_lines(check: Validation, unit: str) -> list[str]:
    """The results of new seeds, and whether they agree with the search. `unit` is a server."""
    lines = []
    for judged in (check.fewer, check.recommended):
        if not judged:
            continue
        each = "; ".join(
            f"seed {judgement.seed} {'met' if judgement.met else 'missed'} ("
            + ", ".join(f"{a.target.name} {a.shown}" for a in judgement.attained)
            + ")"
            for judgement in judged
        )
        lines.append(f"validation, {numbered(judged[0].gpus, unit)}: {each}")
    doubt = ""
    if not all(judgement.met for judgement in check.recommended):
        doubt = f"; a new seed misses the targets: take one {unit} more"
    elif any(judgement.met for judgement in check.fewer):
        doubt = f"; one {unit} fewer is enough for some of them: the answer is on the safe side"
    lines.append(f"validation: new seeds, {check.window.judged_s:,.0f} s judged{doubt}")
    return lines
