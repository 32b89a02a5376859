"""Build the tables of a report as HTML. Every text from a run is escaped here."""

from collections.abc import Sequence
from html import escape

import orjson

from forebay.analysis.compare.compare import (
    WHOLE_RUN,
    Comparison,
    ComparisonRow,
    Unit,
    definition_notes,
)
from forebay.analysis.compare.figures import UnansweredRow, backends, imbalance, unanswered
from forebay.analysis.compare.terminal import FORMATS
from forebay.analysis.report.plots import legend_mark
from forebay.analysis.runs.provenance import setting, settings, verdict
from forebay.analysis.runs.run import RunData
from forebay.analysis.statistics.units import NONE, counts, durations, ratio, shares
from forebay.replay.plan.slo import Slo

DEFINITIONS = (
    ("TTFT", "Time to first token: from when the request was due, not from when it was sent, to "
     "the first event with output. So a late client cannot hide a wait."),
    ("E2E", "End-to-end latency: from when the request was due to its last output."),
    ("Session E2E", "From when the first request of a session was due to the last output of its "
     "last answer, sub-agents included. A session with an unanswered request has none."),
    ("TPOT", "Time per output token after the first event; one value per request."),
    ("ITL", "Inter-token latency: the gap between output events, over all tokens of all requests."),
    ("Worst stall", "The longest gap between output events within one answer."),
    ("Goodput", "Requests per second that met every latency target. Attainment is their share of "
     "all requests due: rejected, failed and unsent ones count as missed."),
    ("Prefix hit ratio", "Share of the prompt tokens that the engine had in its prefix cache."),
    ("Imbalance", "Prompt tokens of the busiest backend divided by those of the idlest."),
    ("Percentile", "The smallest observed value that at least this share of requests does not "
     "exceed; never interpolated."),
    ("95 % interval", "For percentiles: from 1,000 resamples (fewer in long runs) of blocks of "
     "neighbouring requests, so that one bad period counts once. For attainment and goodput: "
     "Wilson's and Newcombe's method, with independent requests."),
    ("Not significant", "The 95 % interval of the ratio includes 1, so the difference may be "
     "chance."),
    ("Verdict", "valid: requests were sent when due. client-limited or cap-limited: they were "
     "not, so the figures include delays of the load generator."),
)  # fmt: skip

_CARDS = (("hit_ratio", "Prefix hit ratio"), ("imbalance", "Imbalance between backends"))


def cards(runs: Sequence[RunData], comparisons: Sequence[Comparison]) -> str:
    """The most important figures, one card each."""
    first = comparisons[0]
    figures: list[tuple[str, str, str]] = []
    for bucket in first.buckets:
        percentile = first.headline_percentile[bucket]
        if percentile is not None:
            latency = first.headline_latency[bucket]
            label = f"{latency.upper()} {percentile}, {bucket}"
            figures.append((bucket, f"{latency}_{percentile}", label))
    figures.append((WHOLE_RUN, "goodput", "Goodput"))
    figures.append((WHOLE_RUN, "attainment", "Requests within target"))
    figures += [(bucket, "stall_max", f"Longest stall, {bucket}") for bucket in first.buckets]
    figures += [(WHOLE_RUN, key, label) for key, label in _CARDS]
    drawn = []
    for section, key, label in figures:
        lines = [comparison.line(section, key) for comparison in comparisons]
        rows = [line for line in lines if line is not None]
        if len(rows) == len(lines) and rows[0].a is not None:
            drawn.append(_card(runs, label, rows))
    return f'<div class="cards">{"".join(drawn)}</div>' if drawn else ""


def _card(runs: Sequence[RunData], label: str, lines: Sequence[ComparisonRow]) -> str:
    values = [lines[0].a, *(line.b for line in lines)][: len(runs)]
    rows = "".join(
        f'<div><span class="name">{escape(run.name)}</span><span class="value">{value}</span></div>'
        for run, value in zip(runs, FORMATS[lines[0].unit](values), strict=True)
    )
    change = _change(lines[0]) if len(runs) == 2 else ""
    return f'<section class="card"><h3>{escape(label)}</h3>{rows}{change}</section>'


def _change(line: ComparisonRow) -> str:
    """The change from the first run to the second, coloured only if clearly good or bad."""
    if line.better is None or line.ratio is None:
        return ""
    kind = {"b": "better-text", "a": "worse-text"}.get(line.better, "soft")
    if line.better == "equal":
        words = "equal within 5 %"
    elif line.ratio in (0.0, float("inf")):
        words = "better" if line.better == "b" else "worse"
    else:
        more, less = ("longer", "shorter") if line.unit == "s" else ("higher", "lower")
        words = f"{ratio(max(line.ratio, 1 / line.ratio))} {less if line.ratio > 1 else more}"
        words += ", not significant" if line.better == "unclear" else ""
    return f'<p class="change {kind}">{words}</p>'


def figures_table(runs: Sequence[RunData], comparisons: Sequence[Comparison]) -> str:
    """Every figure of every run. Two runs also get the ratio and the better run."""
    # One row for each figure, with its value in every run.
    rows: dict[tuple[str, str], tuple[str, Unit, list[float | None]]] = {}
    for number, comparison in enumerate(comparisons, 1):
        for line in comparison.lines:
            if (line.section, line.key) not in rows:
                empty: list[float | None] = [None] * max(2, len(runs))
                rows[line.section, line.key] = (line.label, line.unit, empty)
            values = rows[line.section, line.key][2]
            values[0], values[number] = line.a, line.b
    # Sections keep the order of the comparison.
    two = len(runs) == 2
    sections = sorted({section for section, _ in rows}, key=[key[0] for key in rows].index)
    body = []
    for section in sections:
        title = "all requests" if section == WHOLE_RUN else section
        wide = len(runs) + 1 + 2 * two
        body.append(
            f'<tr><th class="section" colspan="{wide}" scope="rowgroup">{escape(title)}</th></tr>'
        )
        for (of, key), (label, unit, values) in rows.items():
            if of != section:
                continue
            cells = "".join(_cell(value) for value in FORMATS[unit](values[: len(runs)]))
            if two:
                cells += _judgement(comparisons[0], comparisons[0].line(section, key))
            body.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    heads = "".join(f'<th class="n name" scope="col">{escape(run.name)}</th>' for run in runs)
    if two:
        heads += (
            '<th class="n" scope="col">second / first</th><th class="why" scope="col">better</th>'
        )
    note = (
        "Latencies are of answered requests. A dash: not measured, or fewer than "
        f"{comparisons[0].min_beyond} samples beyond the percentile (p99 needs "
        f"{comparisons[0].min_beyond * 100:,} requests). "
    ) + " ".join(definition_notes(runs))
    return f"<section><h2>All figures</h2>{_table(f'<th></th>{heads}', body, note)}</section>"


def _judgement(comparison: Comparison, line: ComparisonRow | None) -> str:
    if line is None:
        return _cell("") + "<td></td>"
    names = {"a": comparison.a.name, "b": comparison.b.name,
             "equal": "equal within 5 %", "unclear": "not significant"}  # fmt: skip
    words = escape(names[line.better]) if line.better else ""
    kind = {"b": "better-text", "a": "worse-text"}.get(line.better or "", "soft")
    if (interval := line.change_interval) is not None:
        low, high = escape(ratio(interval.low)), escape(ratio(interval.high))
        words += f' <span class="soft small">(95 %: {low} to {high})</span>'
    return f'{_cell(ratio(line.change))}<td class="why {kind}">{words}</td>'


def rejections_table(runs: Sequence[RunData]) -> str:
    """Rejected and failed requests by reason, with the wall-clock time to the error answer."""
    body = []
    for number, run in enumerate(runs):
        for row in unanswered(run):
            body.append(_rejection_row(number, run, row))
    if not body:
        answered = "None: every request was answered in full."
        text = answered if any(run.requests for run in runs) else "There were no requests."
        return f"<section><h2>Rejected and failed requests</h2><p>{text}</p></section>"
    heads = (
        '<th scope="col">run</th><th scope="col">outcome</th><th scope="col">reason</th>'
        '<th class="n" scope="col">HTTP status</th><th class="n" scope="col">requests</th>'
        '<th class="n" scope="col">of all due</th><th class="n" scope="col">answered in</th>'
        '<th class="n" scope="col">longest</th><th class="n" scope="col">Retry-After</th>'
    )
    note = (
        "Answered in: median and longest wall-clock time from sending to the complete error "
        "answer. Retry-After: median."
    )
    return f"<section><h2>Rejected and failed requests</h2>{_table(heads, body, note)}</section>"


def _rejection_row(number: int, run: RunData, row: UnansweredRow) -> str:
    scale = time_scale(run)
    usual, longest = (
        None if value is None else value / scale for value in (row.answer_p50_s, row.answer_max_s)
    )
    delays = durations([usual, longest])
    retry = NONE if row.retry_after_s is None else f"{row.retry_after_s:.1f} s"
    return (
        f"<tr>{_run_cell(number, run)}<td>{escape(row.outcome)}</td><td>{escape(row.reason)}</td>"
        f"{_cell(row.status or NONE)}{_cell(counts([row.count])[0])}"
        f"{_cell(shares([row.count / run.requests])[0])}{_cell(delays[0])}{_cell(delays[1])}"
        f"{_cell(retry)}</tr>"
    )


def time_scale(run: RunData) -> float:
    """Seconds of the run per wall-clock second, 1 if run.json has no scale."""
    value = setting(run, "time scale")
    usable = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(value) if usable else 1.0


def backends_table(runs: Sequence[RunData]) -> str:
    """Prompt tokens, requests and hit ratio of each backend."""
    body = []
    for number, run in enumerate(runs):
        rows = backends(run)
        total = sum(row.prompt_tokens for row in rows)
        for row in rows:
            part = row.prompt_tokens / total if total else 0.0
            bar = f'<span class="bar run{number}" style="width:{part * 9:.2f}em"></span>'
            body.append(
                f"<tr>{_run_cell(number, run)}<td>{escape(row.name)}</td>"
                f"{_cell(counts([row.requests])[0])}{_cell(counts([row.prompt_tokens])[0])}"
                f"{_cell(shares([part])[0])}<td>{bar}</td>{_cell(shares([row.hit_ratio])[0])}</tr>"
            )
    if not body:
        return ""
    balance = "; ".join(f"{run.name} {ratio(imbalance(run))}" for run in runs)
    heads = (
        '<th scope="col">run</th><th scope="col">backend</th><th class="n" scope="col">requests'
        '</th><th class="n" scope="col">prompt tokens</th><th class="n" scope="col">share</th>'
        "<td></td>"
        '<th class="n" scope="col">hit ratio</th>'
    )
    note = f"Prompt tokens of the busiest backend divided by those of the idlest: {balance}."
    return f"<section><h2>Balance of the backends</h2>{_table(heads, body, note)}</section>"


def provenance_section(runs: Sequence[RunData]) -> str:
    """The settings and commands that repeat each run."""
    parts = []
    for number, run in enumerate(runs):
        rows = {"verdict": str(verdict(run)), **settings(run)}
        lag = run.summary.get("schedule_lag_ms")
        if isinstance(lag, dict):
            lags = [
                f"{name} {lag_ms:g} ms"
                for name in ("p50", "p99", "max")
                if (lag_ms := run.shown("schedule_lag_ms", name)) is not None
            ]
            rows["schedule lag"] = ", ".join(lags)
        body = [
            f'<tr><th scope="row">{escape(what)}</th><td>'
            + (f"<code>{escape(text)}</code>" if what in _CODE else escape(text))
            + "</td></tr>"
            for what, text in rows.items()
            if text
        ]
        whole = orjson.dumps(run.info, option=orjson.OPT_INDENT_2).decode()
        parts.append(
            f"<h3>{legend_mark(number)} {escape(run.name)}</h3>"
            f'<table class="settings"><tbody>{"".join(body)}</tbody></table>'
            f"<details><summary>run.json</summary><pre>{escape(whole)}</pre></details>"
        )
    return f"<section><h2>How to repeat this</h2>{''.join(parts)}</section>"


_CODE = frozenset({"command", "trace sha256", "schedule sha256", "targets"})


def definitions(min_beyond: int, slos: Sequence[Slo]) -> str:
    """The definitions of all terms."""
    items = "".join(f"<dt>{escape(word)}</dt><dd>{escape(says)}</dd>" for word, says in DEFINITIONS)
    judged = f" Latency targets: {', '.join(str(slo) for slo in slos)}." if slos else ""
    text = f"A percentile is shown only with at least {min_beyond} samples beyond it.{judged}"
    return (
        f"<section><h2>Definitions</h2><dl>{items}</dl>"
        f'<p class="soft small">{escape(text)}</p></section>'
    )


def _table(heads: str, body: Sequence[str], caption: str) -> str:
    return (
        f'<p class="soft small">{escape(caption)}</p>'
        '<div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _run_cell(number: int, run: RunData) -> str:
    return f'<td class="run">{legend_mark(number)} {escape(run.name)}</td>'


def _cell(text: str) -> str:
    return f'<td class="n">{escape(text)}</td>'
