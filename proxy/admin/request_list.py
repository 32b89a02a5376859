"""List the requests that ended recently: the slowest, or the rejected requests.

Each row is made from a receipt: when, where, how long, the predicted time, and the main reason.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from math import inf
from typing import Any, Literal, cast, get_args

from forebay.proxy.core.explain.receipt import Receipt, Receipts
from forebay.proxy.diagnose.receipt_text import main_reason

Order = Literal["slowest", "rejected"]
MOST_ROWS = 100
DEFAULT_ROWS = 10
BAD_QUERY = "bad_query"  # code of the error on the admin port


class BadQuery(ValueError):
    """A parameter of the query is wrong. The text names the right values."""


def listed(
    receipts: Receipts, query: Mapping[str, Sequence[str]], now: float, buckets: Iterable[str]
) -> dict[str, Any]:
    """Return the JSON of `/requests`. Raises BadQuery.

    Args:
        query: `by`, `count`, `bucket` and `since_s`, as parsed from the target.
        buckets: the buckets in force. A request may have had a bucket that is gone.
    """
    # Check the parameters.
    by = _one(query, "by", "slowest")
    if by not in get_args(Order):
        raise BadQuery("by: give slowest or rejected")
    count = int(_number(query, "count", DEFAULT_ROWS, 1, MOST_ROWS))
    since_s = _number(query, "since_s", inf, 0.0, inf)
    bucket = _one(query, "bucket", "")
    known_buckets = {*buckets, *(receipt.bucket for receipt in receipts.ended.values())}
    if bucket and bucket not in known_buckets:
        raise BadQuery(f"bucket: give one of {', '.join(sorted(known_buckets - {''}))}")
    # Choose the receipts first, because only shown receipts need rows.
    recent = [
        receipt
        for receipt in receipts.ended.values()
        if now - receipt.ended_at <= since_s and bucket in ("", receipt.bucket)
    ]
    rows = [_row(receipt, now) for receipt in _first(recent, by, count)]
    return {
        "by": by,
        "remembered": len(receipts.ended),
        "kept": receipts.keep,
        "considered": len(recent),
        "unseen": sum(_unseen(receipt) for receipt in recent),
        "by_tenant": by_count(
            Counter(r.tenant for r in recent if r.tenant and r.state == "refused")
        ),
        "requests": ordered(rows, cast(Order, by), count),
    }


def by_count(rejected: "Counter[str]") -> dict[str, int]:
    """Return the rejections by tenant, the most first."""
    return dict(rejected.most_common(MOST_ROWS))


def _first(receipts: Sequence[Receipt], by: str, count: int) -> list[Receipt]:
    """Return the receipts that are listed."""
    if by == "rejected":
        rejected = (receipt for receipt in receipts if receipt.state == "refused")
        return nlargest(count, rejected, key=lambda receipt: receipt.ended_at)
    by_latency = ((latency, r) for r in receipts if (latency := _latency_s(r)) is not None)
    return [r for _, r in nlargest(count, by_latency, key=lambda pair: pair[0])]


def ordered(rows: Sequence[dict[str, Any]], by: Order, count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows: the slowest first, or the latest rejections first."""
    if by == "rejected":
        chosen = [row for row in rows if row["state"] == "refused"]
        return sorted(chosen, key=lambda row: row["age_s"])[:count]
    chosen = [row for row in rows if row["latency_s"] is not None]
    return sorted(chosen, key=lambda row: -row["latency_s"])[:count]


def _unseen(receipt: Receipt) -> bool:
    """True if it was answered without a first token that the proxy could see."""
    answered = receipt.state == "ended" and receipt.status < 400
    return answered and receipt.first_token_at < 0.0


def _row(receipt: Receipt, now: float) -> dict[str, Any]:
    chosen = receipt.chosen
    return {
        "request": receipt.id,
        "age_s": round(now - receipt.ended_at, 3),
        "state": receipt.state,
        "bucket": receipt.bucket or None,
        "service_class": receipt.service_class,
        "tenant": receipt.tenant or None,
        "prompt_tokens": receipt.prompt_tokens,
        "backend": receipt.backend or None,
        "status": receipt.status or None,
        "latency_s": _latency_s(receipt),
        "ttft_s": _since(receipt, receipt.first_token_at),
        "queue_s": _since(receipt, receipt.sent_at),
        "predicted_ttft_s": round(chosen.ttft_s, 6) if chosen else None,
        "reason": main_reason(receipt),
        "rule": receipt.rule,
        "hindsight": receipt.hindsight or None,
    }


def _latency_s(receipt: Receipt) -> float | None:
    """Return its time to first token, or to its end without one, or None if not comparable."""
    if receipt.state == "refused" or _unseen(receipt):
        return None
    first_at = receipt.first_token_at
    return _since(receipt, first_at if first_at >= 0.0 else receipt.ended_at)


def _since(receipt: Receipt, at: float) -> float | None:
    return None if at < 0.0 else round(at - receipt.arrived_at, 6)


def _one(query: Mapping[str, Sequence[str]], name: str, default: str) -> str:
    return query[name][0] if name in query else default


def _number(
    query: Mapping[str, Sequence[str]], name: str, default: float, least: float, most: float
) -> float:
    if name not in query:
        return default
    try:
        value = float(query[name][0])
    except ValueError:
        value = -inf
    if not least <= value <= most:
        most_text = f" to {most:g}" if most < inf else " or more"
        raise BadQuery(f"{name}: give {least:g}{most_text}")
    return value
