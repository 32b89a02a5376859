"""Compute a server's KV cache in tokens, and how many requests may run in it at once."""

import re
from collections.abc import Sequence

from forebay.replay.engine.hardware.kv_layout import KV_VALUE_BYTES, kv_layout
from forebay.replay.engine.hardware.memory import Adapters, MemoryOptions, memory_budget
from forebay.replay.fleet.gpu.gpus import Gpu
from forebay.replay.fleet.gpu.profiles import Profile
from forebay.traces.errors import InputError

CHAT_TOKENS = 5_000
"""Longest prompt of the bucket `chat`. --max-num-seqs follows from the number that fits."""
LEAST_SEQS, MOST_SEQS, USUAL_SEQS = 16, 256, 64
_UNITS = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip
_BYTES = re.compile(r"([0-9]{1,18})(\.[0-9]{1,18})?([kmgtKMGT]?)")


def kv_tokens(
    profile: Profile,
    context: int | None,
    gpus: Sequence[Gpu],
    *,
    kv_memory: str | None,
    utilization: float,
    batched_tokens: int,
    seqs: int | None,
    ranks: int = 1,
    kv_cache_dtype: str = "auto",
    adapters: Adapters | None = None,
) -> int | None:
    """Return the KV cache, tokens, of the server with the least. None where sizes are unknown.

    Args:
        context: longest request, tokens (InputError: it does not fit).
        kv_memory: --kv-cache-memory-bytes. None: the memory that `utilization` leaves.
        ranks: GPUs of one server.
        adapters: room for adapters (InputError: a model whose adapters are not counted).
    """
    if kv_memory is not None:
        size = parse_bytes(kv_memory)
    if profile.shape is None or context is None:
        return None
    automatic = kv_cache_dtype == "auto"
    options = MemoryOptions(
        value_bytes=profile.shape.kv_value_bytes if automatic else KV_VALUE_BYTES[kv_cache_dtype],
        tensor_parallel=ranks,
        max_num_batched_tokens=batched_tokens,
        gpu_memory_utilization=utilization,
        max_num_seqs=seqs or MOST_SEQS,
        adapters=adapters,
    )
    # The size as given, or the rest of the smallest GPU's memory.
    if kv_memory is not None:
        tokens = int(size / kv_layout(profile.shape, options).bytes_per_token)
        where = f"--kv-cache-memory-bytes {kv_memory}"
        more = "more, or "
    else:
        least = min(gpus, key=lambda gpu: gpu.total_gib)
        budget = memory_budget(profile.shape, least.total_gib, options)
        tokens = max(0, budget.pool_tokens(context))
        where = f"{utilization:g} of the {least.total_gib:.1f} GiB of GPU {least.index}"
        more = "" if utilization >= 0.95 else "a larger --gpu-memory-utilization, or "
    # One request of the longest context must fit.
    if tokens < context:
        shorter = tokens // 1024 * 1024
        cure = f"--max-model-len {shorter}" if shorter else "a smaller model"
        raise InputError(
            f"{profile.repository}: {where} holds {tokens:,} tokens of KV cache beside the "
            f"weights, less than one request of {context:,}; give {more}{cure}"
        )
    return tokens


def parse_bytes(text: str) -> int:
    """Read `256M`, `20.5g` or bytes as vLLM 0.32 does.

    K, M, G, T are powers of 1024 and take whole numbers. k, m, g, t are powers of 1000. Older
    versions lack T and t, so vLLM is given the number of bytes.
    """
    match = _BYTES.fullmatch(text.strip())
    whole, fraction, unit = match.groups() if match else ("0", None, "")
    if fraction and unit.islower():
        value = int(float(whole + fraction) * _UNITS[unit])
    else:
        value = 0 if fraction else int(whole) * _UNITS.get(unit, 1)
    if value <= 0:
        raise InputError(
            f"--kv-cache-memory-bytes {text}: give bytes, such as 256M or 4G; in powers of 1000 "
            "4.5g as well"
        )
    return value


def sequences(limit: int | None, kv_tokens: int | None) -> tuple[int, str]:
    """Return --max-num-seqs and the reason for it."""
    if limit is not None:
        return limit, "most requests in a step, as given; the others wait in the proxy"
    if kv_tokens is None:
        return USUAL_SEQS, "most requests in a step; the others wait in the proxy"
    fit = kv_tokens // CHAT_TOKENS
    seqs = min(MOST_SEQS, max(LEAST_SEQS, 1 << max(0, fit.bit_length() - 1)))
    return seqs, (
        f"most requests in a step: the KV cache (computed: {kv_tokens:,} tokens) holds {fit} of "
        f"{CHAT_TOKENS:,} tokens; the power of two below, {LEAST_SEQS} to {MOST_SEQS}"
    )
