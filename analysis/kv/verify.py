"""Compare the cache a vLLM made with what the configuration says, and with the GiB it logged."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.analysis.kv.plan import Choices, Plan, choose_gpu, choose_model, make_plan
from forebay.analysis.kv.start_log import StartLog, parse_start_log
from forebay.replay.engine.hardware.specs import GIB
from forebay.traces.errors import InputError

_ROUNDING_GIB = 0.005
"""vLLM logs GiB to two decimals."""
_OLD_SEQUENCES = 256
_OLD_WHOLE_PROMPTS = 32_768
"""V0 took prompts whole, up to this --max-model-len; beyond, chunks of 512 tokens by default."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A log beside the arithmetic.

    Attributes:
        predicted_tokens, actual_tokens: size of the cache; the first from the configuration alone.
        low_blocks, high_blocks: what the logged GiB allow, given its two decimals; None unlogged.
        notes: what was taken from the log that the configuration does not say.
    """

    plan: Plan
    log: StartLog
    predicted_tokens: int
    actual_tokens: int
    actual_blocks: int
    low_blocks: int | None
    high_blocks: int | None
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """Predicted from the configuration over actual, less 1."""
        return self.predicted_tokens / self.actual_tokens - 1

    @property
    def exact(self) -> bool | None:
        """Whether the blocks are what the logged GiB hold; None where no GiB are logged."""
        if self.low_blocks is None or self.high_blocks is None:
            return None
        return self.low_blocks <= self.actual_blocks <= self.high_blocks

    @property
    def bytes_error(self) -> float | None:
        """How far the nearest block count the logged GiB allow is from the actual one."""
        if self.low_blocks is None or self.high_blocks is None:
            return None
        nearest = min(max(self.actual_blocks, self.low_blocks), self.high_blocks)
        return nearest / self.actual_blocks - 1

    def within(self, tolerance: float) -> bool:
        """Whether both comparisons stay within `tolerance`, a share."""
        errors = (self.error, self.bytes_error or 0.0)
        return all(abs(error) <= tolerance for error in errors)

    def as_json(self) -> dict[str, Any]:
        budget = self.plan.budget
        return {
            "model": self.plan.shape.name,
            "gpu": self.plan.gpu.name,
            "vllm": self.log.version,
            "predicted_tokens": self.predicted_tokens,
            "actual_tokens": self.actual_tokens,
            "error": round(self.error, 5),
            "actual_blocks": self.actual_blocks,
            "blocks_from_logged_gib": None
            if self.low_blocks is None
            else [self.low_blocks, self.high_blocks],
            "exact": self.exact,
            "gib": {
                name: {"predicted": round(predicted / GIB, 3), "logged": logged}
                for name, predicted, logged in parts(self)
            },
            "pool_bytes": round(budget.pool),
            "notes": list(self.notes),
        }


def parts(verdict: Verdict) -> list[tuple[str, float, float | None]]:
    """(name, predicted bytes, logged GiB) of each line of the budget."""
    budget, log = verdict.plan.budget, verdict.log
    return [
        ("weights", budget.weights, log.weights_gib),
        ("activation", budget.activation, log.activation_gib),
        ("non_torch", budget.non_torch, log.non_torch_gib),
        ("cuda_graphs", budget.cuda_graphs, log.cuda_graph_gib),
        ("kv_cache", budget.pool, log.available_gib),
    ]


def verify_log(
    text: str,
    where: str,
    choices: dict[str, Any],
    *,
    model: str | None = None,
    weights_gib: float | None = None,
    gpu: str | None = None,
    gpu_memory_gib: float | None = None,
) -> Verdict:
    """Judge the log `text` from `where`; `choices` (fields of Choices) win over what it says.

    Raises InputError where the log lacks the cache's size, or neither it nor the options tell the
    model or the GPU.
    """
    log = parse_start_log(text, where)
    name = model or log.model
    if name is None:
        raise InputError(f"{where}: does not name the model; give --model")
    shape = choose_model(name, weights_gib)
    # It did start with this length: its operator may have stretched the context.
    longest = choices.get("max_model_len") or log.max_model_len or shape.max_model_len
    shape = replace(shape, max_model_len=max(shape.max_model_len, longest))
    if gpu_memory_gib is None:
        gpu_memory_gib = log.total_gib
    if gpu is None and gpu_memory_gib is None and log.set_bytes is not None:
        gpu, gpu_memory_gib = "any GPU", log.set_bytes / GIB  # its size does not matter then
    if gpu is None and gpu_memory_gib is None:
        raise InputError(f"{where}: does not tell the GPU's memory; give --gpu")
    chosen_gpu = choose_gpu(gpu, gpu_memory_gib)
    said, notes = _said(log)
    plan = make_plan(shape, chosen_gpu, replace(Choices(), **{**said, **choices}))
    low = high = None
    if log.set_bytes is not None:
        low = high = plan.budget.layout.blocks_in(log.set_bytes)
        requested = plan.budget.taken + log.set_bytes
        plan = replace(plan, budget=replace(plan.budget, requested=requested, blocks=low))
        notes.append("kv_cache_memory_bytes set the cache's size: only its division is checked")
    elif log.available_gib is not None and (log.blocks or log.tokens) is not None:
        low = plan.budget.layout.blocks_in((log.available_gib - _ROUNDING_GIB) * GIB)
        high = plan.budget.layout.blocks_in((log.available_gib + _ROUNDING_GIB) * GIB)
    blocks = _actual_blocks(log, plan)
    if blocks < 1:
        raise InputError(f"{where}: the KV cache has no blocks: there is nothing to compare with")
    actual = replace(plan.budget, blocks=blocks)
    return Verdict(
        plan=plan,
        log=log,
        predicted_tokens=plan.budget.pool_tokens(plan.max_model_len),
        actual_tokens=actual.pool_tokens(plan.max_model_len),
        actual_blocks=blocks,
        low_blocks=low,
        high_blocks=high,
        notes=tuple(notes),
    )


def _actual_blocks(log: StartLog, plan: Plan) -> int:
    """Blocks as logged, else from the logged tokens, else what the logged GiB hold."""
    layout = plan.budget.layout
    if log.blocks is not None:
        return log.blocks
    if log.tokens is not None:
        longest = plan.max_model_len
        by_length = round(log.tokens / longest * layout.request_blocks(longest))
        groups = layout.full_groups + layout.sliding_groups
        by_groups = round(log.tokens / layout.block_size * groups)
        if layout.one_kind:  # a number that is no multiple is concurrency x length, too
            return by_length if log.tokens % layout.block_size else by_groups
        # With two kinds of layers older versions print the one and newer ones the other.
        if log.concurrency is None:
            return by_length
        requests, tokens = log.concurrency
        blocks = requests * layout.request_blocks(tokens)
        return min(by_length, by_groups, key=lambda one: abs(one - blocks))
    assert log.available_gib is not None
    return layout.blocks_in(log.available_gib * GIB)


def _said(log: StartLog) -> tuple[dict[str, Any], list[str]]:
    """Choices the log tells, and notes on those that are no configuration."""
    said: dict[str, Any] = {
        "tp": log.tensor_parallel_size,
        "kv_cache_dtype": log.kv_cache_dtype,
        "gpu_memory_utilization": log.gpu_memory_utilization,
        "max_num_batched_tokens": log.max_num_batched_tokens,
        "max_num_seqs": log.max_num_seqs,
        "block_size": log.block_size,
        "max_model_len": log.max_model_len,
        "draft_layers": log.draft_layers or None,
    }
    notes = []
    if log.old_engine:
        said["max_num_seqs"] = log.max_num_seqs or _OLD_SEQUENCES
        if log.max_num_batched_tokens is None and log.max_model_len is not None:
            whole = log.max_model_len <= _OLD_WHOLE_PROMPTS
            said["max_num_batched_tokens"] = log.max_model_len if whole else 512
        if log.non_torch_gib is not None:
            said["non_torch_gib"] = log.non_torch_gib
            notes.append(
                f"vLLM's V0 engine: its {log.non_torch_gib:g} GiB outside torch are taken from the "
                "log (they ranged from 0.1 to 1.8)"
            )
    if log.cuda_graph_gib is not None and log.cuda_graph_gib > 0 and not log.old_engine:
        notes.append(
            f"the log sets {log.cuda_graph_gib:g} GiB aside for CUDA graphs; if your version takes "
            "that from the cache, add --cuda-graph-gib"
        )
    return {name: value for name, value in said.items() if value is not None}, notes


def read_source(log: Path | None, metrics: str | None) -> tuple[str, str]:
    """The text to judge and what to call it; raises InputError where it cannot be had."""
    if (log is None) == (metrics is None):
        raise InputError("give a log file, or --metrics with the /metrics page of a server")
    if log is not None:
        try:
            return log.read_text(encoding="utf-8", errors="replace"), str(log)
        except OSError as error:
            raise InputError(f"{log}: cannot read: {error.strerror}") from error
    assert metrics is not None
    if not metrics.startswith(("http://", "https://")):
        raise InputError(f"--metrics {metrics}: give a URL such as http://127.0.0.1:8000/metrics")
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(metrics, timeout=10.0) as answer:
            return answer.read().decode("utf-8", errors="replace"), metrics
    except (URLError, OSError, ValueError) as error:
        raise InputError(f"--metrics {metrics}: cannot read: {error}") from error
