"""The study `prefill`: TTFT against prompt length, and where the quadratic term leads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.analysis.charts.panels import Series, xy_plot
from forebay.analysis.experiments.result import Column, Row
from forebay.analysis.experiments.server_study import ServerStudy, prefill_work
from forebay.analysis.experiments.study import Lengths
from forebay.analysis.statistics.fitting import curve_points, fit_terms
from forebay.analysis.statistics.units import duration


@dataclass(kw_only=True)
class Prefill(ServerStudy):
    """TTFT of a single request against its prompt length, without cache hits.

    Fits fixed + linear + quadratic seconds and finds the length above which the
    quadratic term is the largest.

    Example:  forebay experiment prefill --target sim:phi-3-mini@h200-nvl --out runs/prefill
    """

    NAME = "prefill"
    COLUMNS = (
        Column("prompt_tokens", "prompt", "count"),
        Column("ttft_s", "TTFT"),
        Column("fitted_s", "fitted"),
        Column("lowest_s", "lowest", shown=False),
        Column("highest_s", "highest", shown=False),
        Column("tokens_per_s", "tokens/s", "count"),
        Column("peak_share", "of peak", "share"),
        Column("bound", "bound by", "text"),
    )

    lengths: Lengths = "1k,2k,4k,8k,16k,32k,64k,96k,128000"

    async def loads(self) -> Sequence[int]:
        return await self.open_for(self.lengths)

    async def row(self, load: int) -> Row:
        row = await self.prefilled(load)
        tokens, ttft_s = row["prompt_tokens"], row["ttft_s"]
        reached = self.reached(prefill_work(tokens), ttft_s, "peak_share", "bound")
        return row | {"tokens_per_s": tokens / ttft_s} | reached

    def sentence(self, rows: Sequence[Row]) -> str:
        # Attention grows with the square of the length, everything else linearly.
        xs = [float(row["prompt_tokens"]) for row in rows]
        terms, worst = fit_terms(xs, [row["ttft_s"] for row in rows], (0, 1, 2))
        fixed_s, linear_s, square_s = terms
        crossover = linear_s / square_s if square_s > 0 else math.inf
        for row in rows:
            n = row["prompt_tokens"]
            row["fitted_s"] = fixed_s + linear_s * n + square_s * n * n
        self.facts |= {
            "fixed_s": fixed_s,
            "linear_s_per_token": linear_s,
            "quadratic_s_per_token2": square_s,
            "crossover_tokens": crossover if math.isfinite(crossover) else None,
            "worst_error": worst,
        }
        self.note_warm(rows)
        # The sentence gives the formula, its crossover, and the resource that binds.
        words = (
            f"TTFT = {duration(fixed_s)} + {linear_s * 1e6:.1f} µs per token + "
            f"{square_s * 1e12:,.0f} ps per token squared (worst error {worst:.1%}). "
        )
        if math.isfinite(crossover):
            words += f"The quadratic term exceeds the linear one from {crossover:,.0f} tokens"
        else:
            words += "No quadratic term was found at these lengths"
        longest = rows[-1]
        if "bound" not in longest:
            self.note("shares of peak need a known --model and --gpu")
            return f"{words}."
        return (
            f"{words}. At {longest['prompt_tokens']:,} tokens a prefill is bound by "
            f"{longest['bound']}, {longest['peak_share']:.0%} of peak FLOP/s."
        )

    def plot(self, rows: Sequence[Row]) -> str:
        facts, measured = self.facts, [(r["prompt_tokens"], r["ttft_s"]) for r in rows]
        a, b, c = (
            facts[key] for key in ("fixed_s", "linear_s_per_token", "quadratic_s_per_token2")
        )
        fitted = curve_points(measured, lambda n: a + b * n + c * n * n)
        crossover = facts["crossover_tokens"]
        note = (crossover, "quadratic leads") if crossover else None
        series = [Series("measured, with the fit", measured, fitted)]
        return xy_plot(series, "prompt tokens", "TTFT", note)
