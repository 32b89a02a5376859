"""Read vLLM's memory figures from a start-up log (0.5 to 0.32), /metrics, or a saved config.

Lines are found by their words, not by their place, because versions word and split them
differently. Several workers log the same line. The smallest cache counts, as in vLLM.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forebay.traces.ground.errors import InputError

# From the start of a row of digits only: else each place in a long row, as in a trace, is tried.
_NUMBER = r"(?<![\d,])(-?\d[\d,]*(?:\.\d+)?)"
_GIB = _NUMBER + r"\s*(?:GiB|GB)"

_FACTS = {
    "available_gib": (
        rf"Available KV cache memory:\s*{_GIB}",  # V1
        rf"available_kv_cache_memory\s+{_GIB}",  # 0.6.5
        rf"reserved for KV Cache is\s*{_GIB}",  # 0.6.6 to 0.8, V0
        rf"kv_cache_size={_GIB}",  # 0.6.4
    ),
    "tokens": (
        rf"GPU KV cache size:\s*{_NUMBER} tokens",
        rf"kv_cache_size_tokens[\"']?[=:]\s*[\"']?{_NUMBER}",
    ),
    "blocks": (
        rf"(?i:\b(?:gpu|cuda) blocks:)\s*{_NUMBER}",
        rf"\bnum_gpu_blocks[\"']?[=:]\s*[\"']?{_NUMBER}",
    ),
    "weights_gib": (
        rf"Model loading took {_GIB}",
        rf"Loading model weights took {_GIB}",
        rf"model weights take\s*{_GIB}",
        rf"{_GIB} for weight",
    ),
    "activation_gib": (
        rf"activation peak memory(?: takes)?\s*{_GIB}",
        rf"{_GIB} for peak activation",
    ),
    "non_torch_gib": (
        rf"non_torch_memory(?: takes|=)?\s*{_GIB}",
        rf"{_GIB} for non-torch memory",
    ),
    "cuda_graph_gib": (rf"\(actual\), {_GIB} \(estimated\)", rf"{_GIB} for CUDAGraph memory"),
    "total_gib": (
        rf"total_gpu_memory\s*[=(]?\s*{_GIB}",
        rf"Free memory on device[^()]*\([\d.]+/{_GIB}\)",
    ),
    "total_bytes": (rf"device_total_memory_bytes[\"']?:\s*{_NUMBER}",),
    "gpu_memory_utilization": (
        rf"gpu[-_]memory[-_]utilization[\"']?\s*[=:( ]\s*[\"']?{_NUMBER}",
        rf"Desired GPU memory utilization is \({_NUMBER}",
    ),
}
_CHOICES = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "tensor_parallel_size",
    "block_size",
)
_FLAGS = (*_CHOICES, "num_gpu_blocks_override", "kv_cache_memory_bytes")
_DTYPE = r"\b(?:kv[-_])?cache[-_]dtype[\"']?\s*[=: ]\s*[\"']?(auto|bfloat16|float16|fp8\w*)"
_OLD_ENGINE = r"(# CPU blocks:|Loading model weights took|\bnon_torch_memory\b)"
_MODEL = (
    r"\bmodel(?:_tag)?[\"']?\s*[=:]\s*[\"']([^\"']+)[\"']",
    r"vllm serve [\"']?([^\s\"'-][^\s\"']*)",
)
_VERSION = (
    r"LLM engine \(v([^)\s]+)\)",
    r"API server version ([\w.+]+)",
    r"vllm_version[\"']?:\s*[\"']([\w.+]+)",
    r"\bversion (\d+\.\d+[\w.+]*)",
)


@dataclass(frozen=True, slots=True)
class StartLog:
    """The figures of one log, None for figures that a version does not log.

    Attributes:
        set_bytes: kv_cache_memory_bytes, if the operator set the size of the cache.
        available_gib: memory for the KV cache, logged with two decimals.
        tokens, blocks: size of the cache.
        concurrency: "Maximum concurrency" as (requests, tokens per request).
        old_engine: vLLM's V0 engine, which measured its memory differently.
        options: the options that the log names, as in `Choices`.
    """

    model: str | None
    version: str | None
    old_engine: bool
    set_bytes: int | None
    available_gib: float | None
    tokens: int | None
    blocks: int | None
    concurrency: tuple[float, int] | None
    weights_gib: float | None
    activation_gib: float | None
    non_torch_gib: float | None
    cuda_graph_gib: float | None
    total_gib: float | None
    options: dict[str, Any]


def parse_start_log(text: str, where: str) -> StartLog:
    """Read `text`. Raises InputError that names `where` if the size of the cache is missing."""
    facts = {name: min(_numbers(text, pattern), default=None) for name, pattern in _FACTS.items()}
    flags = {name: _flag(text, name) for name in _FLAGS}
    if flags["num_gpu_blocks_override"] is not None:
        raise InputError(
            f"{where}: num_gpu_blocks_override was set, so memory did not decide the cache size"
        )
    # Without a size of the cache there is nothing to compare.
    if all(facts[name] is None for name in ("tokens", "blocks", "available_gib")):
        raise InputError(
            f"{where}: no line with the size of the KV cache, such as 'GPU KV cache size: 420,896 "
            "tokens', '# GPU blocks: 26306' or vllm:cache_config_info with num_gpu_blocks"
        )
    # This line has the longest request of versions that log no flags.
    concurrency = re.search(
        rf"Maximum concurrency for {_NUMBER} tokens per request:\s*{_NUMBER}x", text
    )
    longest = flags["max_model_len"] or _flag(text, "max_seq_len")
    if concurrency and longest is None:
        longest = int(_value(concurrency[1]))
    total = facts["total_gib"]
    if facts["total_bytes"] is not None:
        total = facts["total_bytes"] / (1 << 30)
    gib = {name: value for name, value in facts.items() if name.endswith("_gib")}
    return StartLog(
        model=_first(text, _MODEL),
        version=_first(text, _VERSION),
        # Only V0 logged these words; V1 logs "Model loading took" and "non-torch memory".
        old_engine=bool(_first(text, (_OLD_ENGINE,))),
        set_bytes=flags["kv_cache_memory_bytes"],
        tokens=_whole(facts["tokens"]),
        blocks=_whole(facts["blocks"]),
        concurrency=(_value(concurrency[2]), int(_value(concurrency[1]))) if concurrency else None,
        options=_options(text, flags | {"max_model_len": longest}, facts),
        **gib | {"total_gib": total},
    )


def _options(
    text: str, flags: dict[str, int | None], facts: dict[str, float | None]
) -> dict[str, Any]:
    options = {name: flags[name] for name in _CHOICES} | {
        "gpu_memory_utilization": facts["gpu_memory_utilization"],
        "kv_cache_dtype": _first(text, (_DTYPE,)),
        "draft_layers": 1 if re.search(r"[\"']method[\"']:\s*[\"']eagle", text) else None,
    }
    return {name: value for name, value in options.items() if value is not None}


def _numbers(text: str, patterns: tuple[str, ...]) -> Iterator[float]:
    """All numbers found by the first pattern that matches."""
    for pattern in patterns:
        matches = re.findall(pattern, text)
        if matches:
            yield from map(_value, matches)
            return


def _flag(text: str, name: str) -> int | None:
    """The first number given as `--name 5`, `name=5`, `'name': 5` or `name="5"`."""
    words = name.replace("_", "[-_]")
    if name == "tensor_parallel_size":
        words = rf"(?:{words}|(?<=-)tp)"
    match = re.search(rf"\b{words}[\"']?\s*[=: ]\s*[\"']?(\d[\d,]*\d|\d)\b(?!\.\d)", text)
    return int(match[1].replace(",", "")) if match else None


def _first(text: str, patterns: tuple[str, ...]) -> str | None:
    for pattern in patterns:
        if match := re.search(pattern, text):
            return match[1]
    return None


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
