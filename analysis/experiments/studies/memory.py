"""The study `memory`: KV cache in pages against a reserved cache, by concurrency and length."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer

from forebay.analysis.charts.panels import Axis, Panel, Series, count_label, document, line
from forebay.analysis.experiments.result import Column, Row
from forebay.analysis.experiments.study import Study, integers
from forebay.analysis.experiments.target import SIM
from forebay.analysis.kv.plan import Choices, Plan, check_fits, choose_gpu, make_plan
from forebay.replay.engine.hardware.specs import GIB
from forebay.traces.ground.errors import InputError

SCORE_BYTES = 4  # attention scores are computed in 32 bits


@dataclass(kw_only=True)
class Memory(Study):
    """Memory of requests in pages (vLLM) against a fixed reservation of
    max_model_len each.

    Arithmetic for a sim: target, nothing is sent: how many requests fit, how much a
    reservation wastes, activations, and the attention matrix that FlashAttention
    never stores.

    Example:  forebay experiment memory --target sim:llama-3-8b@h200 --out runs/memory
    """

    NAME = "memory"
    COLUMNS = (
        Column("max_model_len", "max_model_len", "count"),
        Column("reserved_gib", "GiB reserved", "figure"),
        Column("paged_gib", "GiB paged", "figure"),
        Column("saved_share", "saved", "share"),
        Column("reserved_at_once", "at once", "count"),
        Column("paged_at_once", "paged", "count"),
        Column("gain", "gain", "ratio"),
        Column("activation_gib", "activation", "figure"),
        Column("matrix_gib", "matrix", "figure"),
        Column("matrix_layer_gib", "matrix of a layer GiB", "figure", shown=False),
        Column("matrix_head_gib", "matrix of a head GiB", "figure", shown=False),
    )

    max_model_lens: Annotated[
        str, typer.Option(help="Tokens that are reserved for a request; k is 1,024.")
    ] = "2k,4k,8k,16k,32k"
    used_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a request has on average.")
    ] = 512
    requests: Annotated[int, typer.Option(min=1, help="Requests of the columns in GiB.")] = 100
    plan: Plan = field(init=False)

    async def loads(self) -> Sequence[int]:
        if not self.target.startswith(SIM):
            raise InputError(f"--target {self.target}: memory is arithmetic; give sim:MODEL@GPU")
        config = self.engine_config()
        gpu = choose_gpu(config.gpu_spec.name, config.gpu_spec.memory_gib)
        choices = Choices(**self.flags_of(Choices))
        self.plan = make_plan(config.model_spec.shape, gpu, choices)
        check_fits(self.plan, self.used_tokens)
        lengths = integers(self.max_model_lens, "--max-model-lens")
        longest = self.plan.shape.max_model_len
        if self.used_tokens > lengths[0] or lengths[-1] > longest:
            raise InputError(
                f"--max-model-lens {self.max_model_lens}: give lengths from --used-tokens "
                f"{self.used_tokens} to {longest}"
            )
        return lengths

    async def row(self, load: int) -> Row:
        """Compare requests in pages with as many reservations of `load` tokens."""
        plan, used, requests = self.plan, self.used_tokens, self.requests
        layout, shape = plan.budget.layout, plan.shape
        reserved = layout.request_blocks(load) * layout.block_bytes
        paged = layout.request_blocks(used) * layout.block_bytes
        alone = Choices(max_num_batched_tokens=load, max_num_seqs=1)
        head = SCORE_BYTES * load * load
        fit, more = plan.budget.whole_requests(load), plan.budget.whole_requests(used)
        return {
            "max_model_len": load,
            "used_tokens": used,
            "requests": requests,
            "reserved_gib": requests * reserved / GIB,
            "paged_gib": requests * paged / GIB,
            "saved_share": 1 - paged / reserved,
            "reserved_at_once": fit,
            "paged_at_once": more,
            "gain": more / fit if fit else None,
            "activation_gib": make_plan(shape, plan.gpu, alone).budget.activation / GIB,
            "matrix_head_gib": head / GIB,
            "matrix_layer_gib": head * shape.heads / GIB,
            "matrix_gib": head * shape.heads * shape.layers / GIB,
        }

    def sentence(self, rows: Sequence[Row]) -> str:
        first, budget = rows[0], self.plan.budget
        self.facts |= {
            "bytes_per_token": budget.layout.bytes_per_token,
            "pool_gib": budget.pool / GIB,
            "weights_gib": budget.weights / GIB,
            "step_activation_gib": budget.activation / GIB,
        }
        self.notes += [
            f"GiB of {self.requests:,} requests, reserved and in pages; at once: whole requests in "
            f"the {budget.pool / GIB:.1f} GiB beside the weights",
            "activation, GiB: the peak of a step with one whole prompt of max_model_len; vLLM "
            f"reserves it once for a step ({budget.activation / GIB:.2f} GiB), not for each "
            "request",
            "matrix, GiB: 32-bit attention scores of all heads and layers; FlashAttention stores "
            "none",
        ]
        gain = f"{first['gain']:.1f} times as many" if first["gain"] else "others do not fit"
        return (
            f"{self.requests:,} requests of {self.used_tokens:,} tokens take "
            f"{first['paged_gib']:.2f} GiB in pages and {first['reserved_gib']:.2f} GiB with "
            f"{first['max_model_len']:,} tokens reserved for each ({first['saved_share']:.1%} "
            f"saved). Beside the weights {first['paged_at_once']:,} fit in pages, {gain}."
        )

    def plot(self, rows: Sequence[Row]) -> str:
        first = rows[0]
        most = min(first["paged_at_once"], 4 * max(1, first["reserved_at_once"]))
        used = f"in pages, {self.used_tokens:,} used"
        memory = [Series(used, (), self._rise(first["paged_gib"], most))]
        for row in rows[::2][:3]:
            name = f"{row['max_model_len']:,} reserved"
            memory.append(Series(name, (), self._rise(row["reserved_gib"], most)))
        fitting = [
            line("in pages", rows, "max_model_len", "paged_at_once"),
            line("reserved", rows, "max_model_len", "reserved_at_once"),
        ]
        fitting = [series for series in fitting if series.points]
        at_once = Axis("requests at once", count_label, log=False)
        lengths = Axis("max_model_len", count_label)
        return document(
            Panel(memory, at_once, Axis("GiB of KV cache", count_label, log=False)),
            Panel(fitting, lengths, Axis("requests at once", count_label)),
        )

    def _rise(self, gib: float, most: int) -> list[tuple[float, float]]:
        """Memory against concurrency, up to the end of the pool. `gib`: all requests together."""
        each = gib / self.requests
        last = min(float(most), self.plan.budget.pool / GIB / each)
        return [(0.0, 0.0), (last, last * each)]
