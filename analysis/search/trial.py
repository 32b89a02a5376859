"""Measure one part of a load: replay rows against a server, or simulate them, and judge them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Protocol

import numpy as np

from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.run import LATENCIES, RunData, Words
from forebay.analysis.search.evidence import Evidence, judge_trial
from forebay.analysis.statistics.quantiles import Floats, order_statistic
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.slo import SESSION, Slo
from forebay.replay.results.printed_table import unanswered_lines
from forebay.replay.results.verdict import FAILED
from forebay.replay.runner import Summary, replay
from forebay.replay.send.drain import run_on_fast_loop
from forebay.traces.ground.command_line.messages import talk
from forebay.traces.ground.schema import TraceRequest


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One part at one load, as `trials.jsonl` stores it.

    Attributes:
        requests: arrivals, including the warm-up.
        good, judged, effective: see `Evidence`.
        completed_per_s: answers a second while requests arrived and were answered.
        ttft_p50_s, ttft_p99_s: percentiles of the judged requests. None if too many are
            unanswered.
        verdict: the replay's. A client that was late proves nothing about the server.
    """

    rate_per_s: float
    part: int
    requests: int
    judged: int
    good: int
    effective: float
    completed_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    verdict: str = "valid"
    reason: str = ""

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.good, self.judged, self.effective)


class TrialMaker(Protocol):
    """A way to measure one part of a load."""

    def run(self, rows: Sequence[TraceRequest], rate_per_s: float, part: int) -> TrialRow: ...


def _play(options: ReplayOptions) -> Summary:
    return run_on_fast_loop(partial(replay, options))


@dataclass(frozen=True, slots=True)
class HttpTrials:
    """Trials against a real server. Each part is a run folder under `folder`.

    Each part has prompts of its own (by its salt), so no part finds another's blocks in a cache.
    """

    options: ReplayOptions
    folder: Path
    slos: tuple[Slo, ...]
    play: Callable[[ReplayOptions], Summary] = field(default=_play, repr=False)

    def run(self, rows: Sequence[TraceRequest], rate_per_s: float, part: int) -> TrialRow:
        out = self.folder / f"{rate_per_s:g}-per-s-{part}"
        options = replace(
            self.options,
            trace=rows,
            rate_per_s=rate_per_s,
            seed=part_seed(self.options.seed, part),
            salt=f"{self.options.salt or token_hex(4)} {rate_per_s:g} {part} {self.options.seed}",
            out=out,
            force=True,
        )
        lasts_s = len(rows) / rate_per_s / options.time_scale
        talk(f"{rate_per_s:g}/s: sending {len(rows):,} requests, about {lasts_s:,.0f} s")
        summary = self.play(options)
        if summary.interrupted:
            raise KeyboardInterrupt
        run = load_run(out)
        row = trial_of_run(run, rate_per_s, part, self.slos)
        replayed = summary.values
        for warning in replayed["warnings"]:
            talk(f"{rate_per_s:g}/s: warning: {warning}")
        if replayed["verdict"] == FAILED:  # a fact about the server, not a doubt about the client
            for line in unanswered_lines(replayed):
                talk(f"{rate_per_s:g}/s: {line}")
            return row
        return replace(row, verdict=replayed["verdict"], reason=replayed["verdict_reason"])


def part_seed(seed: int, part: int) -> int:
    """Make the seed of a part's arrivals: the same for every load, so that loads differ in pace."""
    return seed * 1_000_003 + part


def trial_of_run(run: RunData, rate_per_s: float, part: int, slos: Sequence[Slo]) -> TrialRow:
    """Judge a finished run. Requests count in the order in which they were due."""
    due = run.numbers["intended_s"]
    order = np.argsort(due, kind="stable")
    ok = run.words["outcome"] == "ok"
    values = {
        metric: np.where(ok, run.numbers[column], np.nan)[order]
        for metric, column in LATENCIES.items()
    }
    values[SESSION] = run.task_seconds()[order]
    return trial_row(rate_per_s, part, due[order], run.words["bucket"][order], values, slos)


def trial_row(
    rate_per_s: float,
    part: int,
    due_s: Floats,
    bucket: Words,
    values: Mapping[str, Floats],
    slos: Sequence[Slo],
) -> TrialRow:
    """Judge requests in order of arrival. `values` are seconds by metric, NaN where undefined.

    Completed are the answers that end while judged requests arrive, as a share of these: the time
    after the last arrival, when nothing more comes, would make a short trial look slow.
    """
    score = scores(bucket, values, slos)
    evidence = judge_trial(due_s, score, values["e2e"])
    first = len(due_s) - evidence.count
    ttft = values["ttft"][first:]
    done_s = due_s + values["e2e"]
    ended = int(((done_s > due_s[first]) & (done_s <= due_s[-1])).sum())
    ttft = np.sort(np.where(np.isnan(ttft), np.inf, ttft))
    return TrialRow(
        rate_per_s=rate_per_s,
        part=part,
        requests=len(due_s),
        judged=evidence.count,
        good=evidence.good,
        effective=evidence.effective,
        completed_per_s=rate_per_s * ended / evidence.count,
        ttft_p50_s=_finite(ttft, 0.5),
        ttft_p99_s=_finite(ttft, 0.99),
    )


def scores(bucket: Words, values: Mapping[str, Floats], slos: Sequence[Slo]) -> Floats:
    """Return each request's worst latency as a share of its target, inf without an answer."""
    score = np.where(np.isnan(values["e2e"]), np.inf, 0.0)
    for slo in slos:
        share = values[slo.metric] / slo.limit_s
        undefined = np.inf if slo.metric in ("ttft", "e2e") else 0.0
        share = np.where(np.isnan(share), undefined, share)
        applies = (bucket == slo.bucket) | (slo.bucket is None)
        score = np.where(applies, np.maximum(score, share), score)
    return score


def _finite(ordered: Floats, share: float) -> float | None:
    value = order_statistic(ordered, share) if len(ordered) else np.inf
    return float(value) if np.isfinite(value) else None
