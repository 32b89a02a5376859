"""Compare the KV cache of a real vLLM with the computed one, and with the GiB it logged."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.analysis.kv.plan import Choices, Plan, choose_gpu, choose_model, make_plan
from forebay.analysis.kv.start_log import StartLog, parse_start_log
from forebay.replay.engine.hardware.gpu_memory import GpuMemory
from forebay.replay.engine.hardware.specs import GIB
from forebay.traces.ground.errors import InputError

_ROUNDING_GIB = 0.005
"""vLLM logs GiB to two decimals."""
OLDEST = "0.11"
"""The version of a log that does not say it: such logs are old."""
_OLD_SEQUENCES = 256
_OLD_WHOLE_PROMPTS = 32_768
"""V0 ran prompts whole up to this --max-model-len, and in chunks of 512 tokens beyond it."""


@dataclass(frozen=True, slots=True)
class CacheCheck:
    """A log and the computed plan.

    Attributes:
        predicted_tokens, actual_tokens: size of the cache, computed and logged.
        low_blocks, high_blocks: the blocks that fit the logged GiB, which have two decimals. None
            if no GiB are logged.
        notes: values taken from the log that no configuration determines.
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
        """Relative error of the predicted tokens."""
        return self.predicted_tokens / self.actual_tokens - 1

    @property
    def exact(self) -> bool | None:
        """True if the actual blocks fit the logged GiB. None if no GiB are logged."""
        return None if self.bytes_error is None else self.bytes_error == 0

    @property
    def bytes_error(self) -> float | None:
        """Relative distance of the actual blocks from the nearest count that fits the GiB."""
        if self.low_blocks is None or self.high_blocks is None:
            return None
        nearest = min(max(self.actual_blocks, self.low_blocks), self.high_blocks)
        return nearest / self.actual_blocks - 1

    def within(self, tolerance: float) -> bool:
        """True if both errors are at most `tolerance`, a share."""
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


def parts(check: CacheCheck) -> list[tuple[str, float, float | None]]:
    """(name, predicted bytes, logged GiB) of each part of the memory budget."""
    budget, log = check.plan.budget, check.log
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
) -> CacheCheck:
    """Compare the log `text` from `where`. `choices` (fields of Choices) override its flags.

    Raises InputError if the log lacks the size of the cache, or if neither the log nor the options
    name the model and the GPU.
    """
    log = parse_start_log(text, where)
    name = model or log.model
    if name is None:
        raise InputError(f"{where}: does not name the model; give --model")
    version = choices.get("vllm_version") or _known_version(log) or OLDEST
    shape = choose_model(
        name, weights_gib, quantization=choices.get("quantization"), vllm_version=version
    )
    # The server started with this length: its operator may have extended the context.
    longest = (log.options | choices).get("max_model_len") or shape.max_model_len
    shape = replace(shape, max_model_len=max(shape.max_model_len, longest))
    chosen_gpu = _gpu_of(log, where, gpu, gpu_memory_gib)
    # Options of the command override the flags in the log.
    logged, notes = _logged_choices(log)
    plan = make_plan(
        shape, chosen_gpu, replace(Choices(vllm_version=OLDEST), **{**logged, **choices})
    )
    # The operator set the size, so the memory budget is taken from the log.
    if log.set_bytes is not None:
        blocks = plan.budget.layout.blocks_in(log.set_bytes)
        requested = plan.budget.taken + log.set_bytes
        plan = replace(plan, budget=replace(plan.budget, requested=requested, blocks=blocks))
        notes.append(
            "kv_cache_memory_bytes set the size of the cache; only blocks and tokens are checked"
        )
    # The log rounds its GiB, so it fits a range of block counts.
    low, high = _logged_range(log, plan)
    blocks = _actual_blocks(log, plan)
    if blocks < 1:
        raise InputError(f"{where}: the KV cache has no blocks, so there is nothing to compare")
    actual = replace(plan.budget, blocks=blocks)
    return CacheCheck(
        plan=plan,
        log=log,
        predicted_tokens=plan.budget.pool_tokens(plan.max_model_len),
        actual_tokens=actual.pool_tokens(plan.max_model_len),
        actual_blocks=blocks,
        low_blocks=low,
        high_blocks=high,
        notes=tuple(notes),
    )


def _known_version(log: StartLog) -> str | None:
    """The version in the log if it is a release of vLLM 0.x, not a development version."""
    match = log.version is not None and re.match(r"v?0\.\d+", log.version)
    return log.version if match else None


def _gpu_of(log: StartLog, where: str, gpu: str | None, memory_gib: float | None) -> GpuMemory:
    """The GPU of the options, else the logged memory. Raises InputError if both are missing."""
    if memory_gib is None:
        memory_gib = log.total_gib
    if gpu is None and memory_gib is None:
        if log.set_bytes is None:
            raise InputError(f"{where}: does not state the GPU's memory; give --gpu")
        # kv_cache_memory_bytes set the size of the cache, so the GPU's does not matter.
        gpu, memory_gib = "any GPU", log.set_bytes / GIB
    return choose_gpu(gpu, memory_gib)


def _logged_range(log: StartLog, plan: Plan) -> tuple[int | None, int | None]:
    """The fewest and the most blocks that the logged memory allows. None if it is not logged."""
    layout = plan.budget.layout
    if log.set_bytes is not None:
        blocks = layout.blocks_in(log.set_bytes)
        return blocks, blocks
    if log.available_gib is None or (log.blocks or log.tokens) is None:
        return None, None
    low, high = log.available_gib - _ROUNDING_GIB, log.available_gib + _ROUNDING_GIB
    return layout.blocks_in(low * GIB), layout.blocks_in(high * GIB)


def _actual_blocks(log: StartLog, plan: Plan) -> int:
    """The logged blocks, else computed from the logged tokens, else from the logged GiB."""
    layout = plan.budget.layout
    if log.blocks is not None:
        return log.blocks
    if log.tokens is not None:
        longest = plan.max_model_len
        by_length = round(log.tokens / longest * layout.request_blocks(longest))
        groups = len(layout.groups)
        by_groups = round(log.tokens / layout.block_size * groups)
        if layout.one_kind:  # a number that is no multiple of a block is concurrency x length
            return by_length if log.tokens % layout.block_size else by_groups
        # With two kinds of layers, older versions log by length and newer ones by groups.
        if log.concurrency is None:
            return by_length
        requests, tokens = log.concurrency
        blocks = requests * layout.request_blocks(tokens)
        return min(by_length, by_groups, key=lambda count: abs(count - blocks))
    assert log.available_gib is not None
    return layout.blocks_in(log.available_gib * GIB)


def _logged_choices(log: StartLog) -> tuple[dict[str, Any], list[str]]:
    """The choices in the log, and notes on values that no configuration determines."""
    logged, notes = dict(log.options), list[str]()
    if (version := _known_version(log)) is not None:
        logged["vllm_version"] = version
    # V0 had other defaults, and measured its memory differently.
    if log.old_engine:
        longest = logged.get("max_model_len")
        logged.setdefault("max_num_seqs", _OLD_SEQUENCES)
        if longest is not None:
            whole = longest <= _OLD_WHOLE_PROMPTS
            logged.setdefault("max_num_batched_tokens", longest if whole else 512)
        if log.non_torch_gib is not None:
            logged["non_torch_gib"] = log.non_torch_gib
            notes.append(
                f"vLLM's V0 engine: its {log.non_torch_gib:g} GiB outside torch come from the log, "
                "because they vary from 0.1 to 1.8"
            )
    # Some versions take the graphs from the cache, and the log does not say which.
    if log.cuda_graph_gib is not None and log.cuda_graph_gib > 0 and not log.old_engine:
        notes.append(
            f"the log estimates {log.cuda_graph_gib:g} GiB for CUDA graphs; if your version takes "
            "them from the cache, add --cuda-graph-gib"
        )
    return logged, notes


def read_source(log: Path | None, metrics: str | None) -> tuple[str, str]:
    """The text of the log or page, and its name. Raises InputError if it cannot be read."""
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
