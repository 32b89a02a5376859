"""Print the result of `size` on a terminal, or as JSON."""

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version
from math import isfinite
from statistics import fmean
from typing import TYPE_CHECKING, Any

from forebay.analysis.sizing.guide import SizingAnswer, Validation, sharing_takes_minutes
from forebay.analysis.sizing.judge import FleetJudgement, pooled
from forebay.analysis.statistics.intervals import wilson
from forebay.analysis.statistics.units import numbered

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HOURS_A_MONTH = 730.0
HOUR_S = 3600.0


def _fleet(answer: SizingAnswer) -> str:
    """Name the servers and their GPUs."""
    gpu, each = answer.question.scenario.engine.gpu_spec.name, gpus_per_server(answer)
    if each == 1:
        return f"{answer.gpus} x {gpu}"
    return f"{numbered(answer.gpus, 'server')} of {each} x {gpu} ({answer.gpus * each} GPUs)"


def provenance(answer: SizingAnswer, command: str) -> dict[str, Any]:
    """The settings that repeat the answer, and the source of its step times."""
    engine = answer.question.scenario.engine
    model, gpu = engine.model_spec.name, engine.gpu_spec.name
    file = engine.calibration_file()
    return {
        "command": command,
        "seeds": list(answer.seeds),
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
    answer: SizingAnswer, price_per_gpu_hour: float | None, gpu_watts: float | None = None
) -> dict[str, float] | None:
    """Price and energy of the GPUs, one spare included. None without a price and watts."""
    figures: dict[str, float] = {}
    if price_per_gpu_hour is not None:
        figures |= _price(answer, price_per_gpu_hour)
    if gpu_watts is not None:
        tokens_per_s = answer.question.users.output_tokens_per_s()
        figures["gpu_watts"] = gpu_watts
        figures["joules_per_output_token"] = gpu_watts * paid_gpus(answer) / tokens_per_s
    return figures or None


def _price(answer: SizingAnswer, price_per_gpu_hour: float) -> dict[str, float]:
    users = answer.question.users
    hourly = price_per_gpu_hour * paid_gpus(answer)
    return {
        "price_per_gpu_hour": price_per_gpu_hour,
        "per_hour": hourly,
        "per_month": hourly * HOURS_A_MONTH,
        "per_request": hourly / (users.rate_per_s * HOUR_S),
        "per_million_output_tokens": hourly * 1e6 / (users.output_tokens_per_s() * HOUR_S),
    }


def gpus_per_server(answer: SizingAnswer) -> int:
    """Return the GPUs of one engine. The counts of an answer are engines."""
    return answer.question.scenario.engine.tensor_parallel_size


def paid_gpus(answer: SizingAnswer) -> int:
    """Return the GPUs of all engines, one spare included."""
    return (answer.gpus + 1) * gpus_per_server(answer)


def closest(answer: SizingAnswer) -> str:
    """Name the most used resource of a fleet of one server: it would bind next."""
    at = answer.around[answer.gpus][0].usage
    kinds = {"prefill compute": at.prefill_s, "decode": max(0.0, at.work_s - at.prefill_s)}
    used = {**kinds, "KV cache": at.kv_peak, "slots": at.seats_peak / at.seats}
    most = max(used, key=lambda name: used[name])
    return (
        f"none, one is enough; {most} is used most, {used[most]:.0%}: engines are busy "
        f"{min(1.0, at.work_s):.0%} of the time, {at.prefill_part:.0%} of that with prefills; "
        f"{at.kv_peak:.0%} of the KV cache and {at.seats_peak} of {at.seats} slots at the peak"
    )


def as_json(
    answer: SizingAnswer,
    origin: dict[str, Any],
    price: dict[str, float] | None,
    check: Validation | None,
) -> dict[str, Any]:
    """All figures of the terminal as plain data. null stands for 'never'."""
    return {
        "recommended_gpus": answer.gpus * gpus_per_server(answer),
        "with_one_spare": paid_gpus(answer),
        "servers": answer.gpus,
        "gpus_per_server": gpus_per_server(answer),
        "gpus_by_seed": {"low": answer.range[0], "high": answer.range[1]},
        "binding": answer.binding
        and {"resource": answer.binding.resource, "why": answer.binding.why},
        "closest": None if answer.binding else closest(answer),
        "around": {str(count): [_judged(j) for j in js] for count, js in answer.around.items()},
        "formulas": [{"name": n.name, "gpus": n.gpus, "why": n.why} for n in answer.naive],
        "sensitivity": {
            "seed": answer.seeds[0],
            "nothing_changed": answer.base,
            "gpus": {variant.what: variant.gpus for variant in answer.variants},
        },
        "window_s": {
            "warmup": answer.question.window.warmup_s,
            "judged": answer.question.window.judged_s,
            "cooldown": answer.question.window.cooldown_s,
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
                "ttft_p50_s": _finite(c.p50_s),
                "ttft_p95_s": _finite(c.p95_s),
                "ttft_p99_s": _finite(c.p99_s),
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


def _cost_lines(answer: SizingAnswer, price: dict[str, float]) -> list[str]:
    lines = []
    if "per_hour" in price:
        lines.append(
            f"cost of {numbered(paid_gpus(answer), 'GPU')}: {price['per_hour']:,.2f} per hour, "
            f"{price['per_month']:,.0f} per month of {HOURS_A_MONTH:g} h, "
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
    console: "Console",
) -> None:
    from rich.text import Text

    engine, users = answer.question.scenario.engine, answer.question.users
    targets = answer.question.targets
    low, high = answer.range
    spread = f"{low}" if low == high else f"{low} to {high}"
    error = engine.known_error()
    console.print(
        Text(
            f"{_fleet(answer)} for {engine.model_spec.name}; "
            f"{answer.gpus + 1} to survive the loss of one{f'; {error}' if error else ''}",
            style="bold",
        )
    )
    # The answer's terms: traffic, targets, certainty and the scarce resource.
    lines = [
        f"{users.users:,} users, each with a question every {users.think_s:g} s, "
        f"{users.document_share:.0%} with a document, {users.shared:.0%} of those shared",
        f"targets: {', '.join(str(target) for target in targets)}",
        f"least count by seed: {spread} ({len(answer.seeds)} seeds); the worst seed decides; "
        f"if one of {answer.gpus + 1} fails, the other {answer.gpus} still meet the targets",
    ]
    scarce = answer.binding
    lines.append(
        f"scarce resource: {f'{scarce.resource}: {scarce.why}' if scarce else closest(answer)}"
    )
    lines += _cost_lines(answer, price or {})
    for line in lines:
        console.print(Text(line))
    console.print(_around_table(answer))
    for line in _certainty(answer):
        console.print(Text(line))
    console.print(_naive_table(answer))
    if answer.variants:
        console.print(_variants_table(answer))
        if sharing_takes_minutes(answer.question):
            console.print(
                Text(
                    "not simulated: all documents shared. With layers that keep part of a "
                    "context it takes minutes. Ask with --shared 1."
                )
            )
    if check:
        for line in validation_lines(check, answer.question.unit):
            console.print(Text(line))
    # The last lines name the source of the step times, and repeat the answer.
    calibration = origin["calibration"]
    remark, source = calibration["remark"] or "", f"measured on {calibration['gpu']}"
    words = remark if source in remark else "; ".join(filter(None, (source, remark)))
    for line in (
        f"step times: {words} (details: --json)",
        f"{origin['command']}   seeds {', '.join(map(str, answer.seeds))}; "
        f"forebay {origin['versions']['forebay']}, Python {origin['versions']['python']}, "
        f"{origin['engine']}",
    ):
        console.print(Text(line, style="dim"))


def _table() -> "Table":
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _around_table(answer: SizingAnswer) -> "Table":
    table = _table()
    table.add_column(f"worst of {numbered(len(answer.seeds), 'seed')}", no_wrap=True)
    names = {-1: "N-1", 0: "N", 1: "N+1"}
    for count in answer.around:
        fleet = numbered(count, answer.question.unit)
        table.add_column(f"{names[count - answer.gpus]}: {fleet}", justify="right")
    for label, *cells in _around_rows(answer):
        table.add_row(label, *cells)
    return table


def _around_rows(answer: SizingAnswer) -> Iterator[list[str]]:
    columns = list(answer.around.values())

    def row(label: str, cell: Callable[[list[FleetJudgement]], str]) -> list[str]:
        return [label, *(cell(judged) for judged in columns)]

    yield row("seeds that met all targets", lambda js: f"{sum(j.met for j in js)} of {len(js)}")
    for which, target in enumerate(answer.question.targets):
        yield row(
            f"within {target}",
            lambda js, which=which: (
                min(  # type: ignore[misc]
                    (j.attained[which] for j in js), key=lambda attained: attained.share or 0.0
                ).shown
            ),
        )
    # The worst seed decides, so percentiles are the maximum over the seeds.
    for kind in columns[0][0].classes:
        for mark in ("p50_s", "p95_s", "p99_s"):
            yield row(
                f"{kind} TTFT {mark[:-2]}, s",
                lambda js, kind=kind, mark=mark: _shown(  # type: ignore[misc]
                    max(getattr(j.classes[kind], mark) for j in js)
                ),
            )
    # Times over all seeds end the table.
    yield row("TPOT p95, ms", lambda js: _shown(max(j.tpot_p95_s for j in js) * 1e3))
    yield row("rejected, all seeds", lambda js: f"{sum(j.rejected for j in js):,}")
    yield row("busy, mean", lambda js: f"{fmean(j.busy for j in js):.0%}")
    yield row("KV cache in use, mean", lambda js: f"{fmean(j.usage.kv_mean for j in js):.0%}")
    yield row("prompt tokens cached", lambda js: f"{fmean(j.hit_ratio for j in js):.0%}")


def _shown(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "never"


def _certainty(answer: SizingAnswer) -> list[str]:
    judged = answer.around[answer.gpus]
    intervals = []
    for which, target in enumerate(answer.question.targets):
        good, count = pooled(judged, which)
        low, high = wilson(good, count)
        intervals.append(f"{target.name} {count:,} requests, {low:.1%} to {high:.1%}")
    window = answer.question.window
    return [
        f"at {numbered(answer.gpus, answer.question.unit)}, share within target over all seeds, "
        f"95 % interval (Wilson): {'; '.join(intervals)}",
        f"each seed: {window.judged_s:,.0f} s judged after {window.warmup_s:,.0f} s of warm-up",
    ]


def _naive_table(answer: SizingAnswer) -> "Table":
    table = _table()
    table.add_column("formula", no_wrap=True)
    table.add_column(f"{answer.question.unit}s", justify="right")
    table.add_column("why it differs from the simulation", overflow="fold")
    for formula in answer.naive:
        table.add_row(formula.name, "-" if formula.gpus is None else str(formula.gpus), formula.why)
    return table


def _variants_table(answer: SizingAnswer) -> "Table":
    table = _table()
    table.add_column(f"what if (seed {answer.seeds[0]} only; unchanged: {answer.base})")
    table.add_column(f"{answer.question.unit}s", justify="right")
    table.add_column("change", justify="right")
    for variant in answer.variants:
        change = "" if variant.gpus is None else f"{variant.gpus - answer.base:+d}"
        table.add_row(
            variant.what, "not met" if variant.gpus is None else str(variant.gpus), change
        )
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
