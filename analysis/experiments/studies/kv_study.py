"""The study `kv`: predicted KV-cache use against the reported use, until it is full.

A full cache does not run out of memory: vLLM queues requests, or preempts and recomputes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from forebay.analysis.charts.panels import (
    Axis,
    Panel,
    Series,
    count_label,
    document,
    line,
    share_label,
)
from forebay.analysis.experiments.gauges import GaugeSample, Pool
from forebay.analysis.experiments.http_system import one_way
from forebay.analysis.experiments.result import Column, Row
from forebay.analysis.experiments.study import Study
from forebay.analysis.experiments.systems import PlayedLoad, Way
from forebay.analysis.experiments.target import SIM, StudyFailed
from forebay.analysis.kv.plan import Choices, choose_gpu, make_plan
from forebay.replay.results.row import Row as RequestRow
from forebay.traces.ground.command_line.options import same_named
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

BEYOND = 2  # requests beyond those that fit, to see that they wait
MOST = 256  # requests at once for a server whose max_num_seqs is unknown
LEVELS = 6


@dataclass(kw_only=True)
class KvCache(Study):
    """Predicted against reported KV-cache use, and the point where the cache is
    full.

    Sends 1, 2 ... long requests at once until more do not fit. The prediction is
    made as by `forebay kv`. For a URL, give --gpu and the flags of the server.

    Example:  forebay experiment kv --target sim:phi-3-mini@h200-nvl --out runs/kv
    """

    NAME = "kv"
    COLUMNS = (
        Column("requests", "requests", "count"),
        Column("predicted_share", "predicted", "share"),
        Column("reported_share", "reported", "share"),
        Column("running", "running", "count"),
        Column("waiting", "waiting", "count"),
        Column("preempted", "preempted", "count"),
        Column("predicted_tokens", "predicted tokens", "count", shown=False),
        Column("reported_tokens", "reported tokens", "count", shown=False),
        Column("failed", "failed", "count", shown=False),
        Column("together", "together", "text", shown=False),
    )

    prompt_tokens: Annotated[
        int, typer.Option(min=16, help="Prompt tokens of each long request.")
    ] = 32_000
    output_tokens: Annotated[int, typer.Option(min=2, help="Output tokens of every request.")] = 512
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="The server's value.")] = 8192
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The server's value.")] = 256
    gpu_memory_utilization: Annotated[float, typer.Option(help="The server's value.")] = 0.9
    kv_cache_dtype: Annotated[str, typer.Option(help="The server's value: auto or fp8.")] = "auto"
    way: Way = field(init=False)

    @property
    def length(self) -> int:
        """Tokens of a whole request."""
        return self.prompt_tokens + self.output_tokens

    @property
    def pool(self) -> Pool:
        return self.way.pools[0]

    @property
    def fit(self) -> int:
        """Whole requests in the usable blocks, that is, all but the null block."""
        return (self.pool.blocks - 1) // self.pool.blocks_of(self.length)

    async def loads(self) -> Sequence[int]:
        """Count upwards: a few steps to the requests that fit, then one by one beyond them."""
        self.way = await one_way(self)
        self.measured = self.way.about.name
        if not self.way.pools:
            raise InputError(
                f"--target {self.target}: no vllm:cache_config_info on /metrics; give the URL of "
                "the engine itself, because a proxy does not pass it on"
            )
        # Reject loads that cannot fill the cache before anything is measured.
        option = f"--prompt-tokens {self.prompt_tokens}"
        self.way.about.check_length(self.length, f"{option} with its output")
        fit, most = self.fit, self.way.max_num_seqs or MOST
        if not fit:
            raise InputError(f"{option}: the KV cache has only {self.pool.tokens} tokens")
        if fit + BEYOND > most:
            raise InputError(
                f"{option}: {fit} requests of that length fit, more than may run at once ({most}); "
                "give longer prompts"
            )
        steps = {max(1, round(fit * i / (LEVELS - 1))) for i in range(LEVELS)}
        return sorted(steps | {fit + extra for extra in range(1, BEYOND + 1)})

    async def row(self, load: int) -> Row:
        trace = [
            TraceRequest(f"{load}-{i}", 0.0, self.prompt_tokens, self.output_tokens)
            for i in range(load)
        ]
        (played,) = await self.way.play(f"kv-{load}", trace)
        return self.row_of(played)

    def row_of(self, load: PlayedLoad) -> Row:
        if not load.samples:
            raise StudyFailed("the engine's /metrics no longer has vllm:kv_cache_usage_perc")
        pool, count = self.pool, len(load.seen)
        usable = pool.blocks - 1
        let_in = min(count, usable // pool.blocks_of(self.prompt_tokens))
        predicted = min(1.0, let_in * pool.blocks_of(self.length) / usable)
        reported = max(sample.kv_share for sample in load.samples)
        preemptions = [sample.preemptions for sample in load.samples]
        return {
            "requests": count,
            "predicted_share": predicted,
            "reported_share": reported,
            "predicted_tokens": predicted * usable * pool.block_tokens,
            "reported_tokens": reported * usable * pool.block_tokens,
            "running": max(sample.running for sample in load.samples),
            "waiting": max((sample.waiting for sample in settled(load)), default=0),
            "preempted": max(preemptions) - min(preemptions),
            "failed": sum(reply.outcome != "ok" for reply in load.seen),
            "together": were_together(load.seen, self.fit),
        }

    def sentence(self, rows: Sequence[Row]) -> str:
        by_arithmetic = self._predicted_pool_tokens()
        # The prediction is judged only by rows that fit and whose requests ran together.
        judged = [row for row in rows if row["requests"] <= self.fit and row["together"]]
        apart = [row["requests"] for row in rows if not row["together"]]
        self.facts |= {
            "predicted_pool_tokens": by_arithmetic,
            "reported_pool_tokens": self.pool.tokens,
            "pool_error": by_arithmetic / self.pool.tokens - 1 if by_arithmetic else None,
            "predicted_full_at": self.fit + 1,
            "reported_full_at": self.full_at(rows),
            "worst_share_error": max(
                abs(row["predicted_share"] - row["reported_share"]) for row in judged
            ),
        }
        # Notes say which parts of the prediction were not tested.
        if by_arithmetic is None:
            self.note(
                "the size of the cache was not predicted, because that needs a known --model and "
                "--gpu; use is predicted from the reported size"
            )
        if self.way.about.name.startswith(SIM):
            self.note(
                "the simulated engine computes its cache with the same arithmetic, so only the use "
                "is checked, not the size"
            )
        if apart and apart[0] <= self.fit:
            self.note(
                f"rows from {apart[0]:,} requests on do not count: some requests had ended before "
                "the answers to others began"
            )
        self.note_failed(rows, "failed")
        return self._words(rows, self.tokens_needed() if apart else 0)

    def _predicted_pool_tokens(self) -> int | None:
        """The size of the cache by arithmetic, None without the data sheets."""
        about = self.way.about
        if about.model is None or about.gpu is None:
            return None
        gpu = choose_gpu(about.gpu.name, about.gpu.memory_gib)
        choices = Choices(**same_named(self, Choices) | self.flags_of(Choices))
        plan = make_plan(about.model.shape, gpu, choices)
        return plan.budget.pool_tokens(plan.max_model_len)

    def tokens_needed(self) -> int:
        """Output tokens of the first request while the prompts of the others are computed.

        Each step makes one token of every answer, and computes prompts with the rest of its budget.
        """
        budget = max(1, self.max_num_batched_tokens - self.fit)
        return 1 + -(-(self.fit - 1) * self.prompt_tokens // budget)

    def full_at(self, rows: Sequence[Row]) -> int | None:
        """The first number of requests of which some were held back for lack of KV blocks.

        If more than a request needs was free, they waited for another reason. The result is None
        if the cache was never full.
        """
        a_request = self.pool.blocks_of(self.length) / (self.pool.blocks - 1)
        for row in rows:
            held_back = row["running"] < row["requests"] or row["preempted"]
            if held_back and row["reported_share"] > 1 - a_request:
                return int(row["requests"])
        return None

    def _words(self, rows: Sequence[Row], needed: int) -> str:
        """The conclusion. `needed` is the --output-tokens with which all requests run together."""
        facts, last = self.facts, rows[-1]
        words = f"The KV cache holds {self.pool.tokens:,} tokens"
        if facts["predicted_pool_tokens"] is not None:
            words += f" (predicted {facts['predicted_pool_tokens']:,}, {facts['pool_error']:+.1%})"
        words += f". Its use was predicted within {facts['worst_share_error'] * 100:.1f} points"
        predicted, full = facts["predicted_full_at"], facts["reported_full_at"]
        # The cache was never full: either the study was too short or the prediction is wrong.
        if full is None and self.output_tokens < needed:
            return (
                f"{words}. Where it is full was not seen, because the first requests had ended "
                f"before the last were prefilled: give --output-tokens {needed} or more."
            )
        if full is None:
            words += f". {predicted:,} requests of {self.length:,} tokens should have filled it "
            if last["running"] < last["requests"]:
                return (
                    f"{words}and did not: max_num_seqs let only {last['running']:,} run, or a step "
                    "has fewer tokens than --max-num-batched-tokens says."
                )
            return f"{words}and did not, nor with {last['requests']:,}."
        # The cache was full: compare the count, and describe the fate of the rest.
        agrees = "as predicted" if full == predicted else f"against {predicted:,} predicted"
        words += f". It was full with {full:,} requests of {self.length:,} tokens, {agrees}. Then "
        if last["failed"]:
            return f"{words}{last['failed']:,} requests failed."
        preempted, then = last["preempted"], "the rest waited"
        if preempted:
            then = f"{preempted:,} {'was' if preempted == 1 else 'were'} preempted"
        return f"{words}{then} and nothing ran out of memory."

    def plot(self, rows: Sequence[Row]) -> str:
        predicted = line("predicted", rows, "requests", "predicted_share").points
        reported = line("reported peak", rows, "requests", "reported_share").points
        series = [Series("predicted", (), predicted), Series("reported peak", reported)]
        x = Axis("requests at once", count_label, log=False)
        y = Axis("KV cache in use", share_label, log=False)
        return document(Panel(series, x, y, (float(self.fit), "last that fits")))


def were_together(seen: Sequence[RequestRow], fit: int) -> bool:
    """True if the first `fit` answers had all begun before any ended."""
    begun = sorted(reply.first_s for reply in seen if reply.first_s is not None)[:fit]
    ended = min((reply.done_s for reply in seen if reply.done_s is not None), default=0.0)
    return not begun or begun[-1] <= ended


def settled(load: PlayedLoad) -> Sequence[GaugeSample]:
    """The samples with the most running requests. Before, requests wait for their prefill."""
    most = max(sample.running for sample in load.samples)
    first = next(sample.at_s for sample in load.samples if sample.running == most)
    return [sample for sample in load.samples if sample.at_s >= first and sample.running == most]
