"""List the requests that ended recently: the slowest, or the rejected requests.

Each row is made from a receipt: when, where, how long, the predicted time, and the main reason.
`outcomes` adds up the receipts for `forebay doctor`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import takewhile
from math import inf
from typing import Any, Literal, cast, get_args

from forebay.proxy.core.explain.receipt import Receipt, Receipts
from forebay.proxy.core.learn.cost import features
from forebay.proxy.diagnose.receipt_text import main_reason, since
from forebay.proxy.http1.errors import upstream_error
from forebay.proxy.telemetry.record import CLIENT_GONE

Order = Literal["slowest", "rejected"]
MOST_ROWS = 100
DEFAULT_ROWS = 10
BAD_QUERY = "bad_query"  # code of the error on the admin port
MOST_COUNTED = 2_000  # receipts that a request adds up, in about 5 ms
COMPARED = 1_000  # tokens; the speeds of backends are compared for ten times as many
UPSTREAM_ERROR = upstream_error().code


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
    recent = [r for r in ended_within(receipts, since_s, now) if bucket in ("", r.bucket)]
    rows = [_row(receipt, now) for receipt in _first(recent, by, count)]
    return {
        "by": by,
        "since_s": since_s if since_s < inf else None,
        "remembered": len(receipts.ended),
        "kept": receipts.keep,
        "considered": len(recent),
        "unseen": sum(_unseen(receipt) for receipt in recent),
        "by_tenant": by_count(
            Counter(r.tenant for r in recent if r.tenant and r.state == "refused")
        ),
        "outcomes": outcomes(recent),
        "requests": ordered(rows, cast(Order, by), count),
    }


def ended_within(receipts: Receipts, since_s: float, now: float) -> list[Receipt]:
    """Return the receipts that ended in the last `since_s`, the latest last."""
    latest_first = reversed(receipts.ended.values())
    return list(takewhile(lambda receipt: now - receipt.ended_at <= since_s, latest_first))[::-1]


def outcomes(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """Return sums and lists of the ends of requests, by tenant and by backend.

    `left_after_s` has the waits of clients that left before the first token, `errors` the 4xx
    answers of servers by tenant, model and status. Of a backend, `slowness` has observed over
    usual seconds of first tokens, by prompts whose cache hit is known and at least `COMPARED`
    tokens to compute, and `ended_after_s` the silence before answers that ended without a byte.
    """
    tenants: dict[str, dict[str, Any]] = {}
    errors: Counter[tuple[str, str, int]] = Counter()
    backends: dict[str, dict[str, list[float]]] = {}
    for receipt in receipts[-MOST_COUNTED:]:
        tenant = tenants.setdefault(receipt.tenant, {"requests": 0, "left_after_s": []})
        tenant["requests"] += 1
        if receipt.state == "left" or (
            receipt.status == CLIENT_GONE and receipt.first_token_at < 0.0
        ):
            tenant["left_after_s"].append(round(receipt.ended_at - receipt.arrived_at, 3))
        elif receipt.state == "ended" and 400 <= receipt.status < 500:
            errors[receipt.tenant, receipt.model, receipt.status] += 1
        for name, silence_s in _failed_after_s(receipt):
            _lists(backends, name)["ended_after_s"].append(round(silence_s, 3))
        if (slowness := _slowness(receipt)) is not None:
            _lists(backends, receipt.backend)["slowness"].append(round(slowness, 3))
    return {
        "tenants": tenants,
        "errors": [[*key, count] for key, count in errors.most_common(MOST_ROWS)],
        "backends": backends,
    }


def outcomes_of_all(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outcomes of several workers, added up."""
    errors: Counter[tuple[str, str, int]] = Counter()
    added: dict[str, Any] = {"tenants": {}, "backends": {}}
    for part in parts:
        for tenant, model, status, count in part["errors"]:
            errors[tenant, model, status] += count
        for kind, names in added.items():
            for name, values in part[kind].items():
                before = names.setdefault(name, {})
                for key, value in values.items():
                    before[key] = before[key] + value if key in before else value
    return {**added, "errors": [[*key, count] for key, count in errors.most_common(MOST_ROWS)]}


def _lists(backends: dict[str, dict[str, list[float]]], name: str) -> dict[str, list[float]]:
    return backends.setdefault(name, {"slowness": [], "ended_after_s": []})


def _failed_after_s(receipt: Receipt) -> Iterator[tuple[str, float]]:
    """Yield each backend that failed before the first byte, and how long it was silent."""
    sent_at = receipt.arrived_at
    for step in receipt.steps:
        if step.kind == "sent":
            sent_at = step.at
        elif step.kind == "failed":
            yield step.backend, step.at - sent_at
    if receipt.state == "ended" and receipt.reason == UPSTREAM_ERROR:
        yield receipt.backend, receipt.ended_at - sent_at


def _slowness(receipt: Receipt) -> float | None:
    """Return observed over usual seconds to the first token, or None if the work is not known."""
    if receipt.first_token_at < 0.0 or receipt.tries != 1:
        return None
    if receipt.cached_tokens < 0 and receipt.matched_tokens:
        return None  # its cache hit was only believed
    tokens = receipt.engine_tokens or receipt.prompt_tokens
    uncached = tokens - max(0, receipt.cached_tokens)
    if uncached < COMPARED:
        return None
    return (receipt.first_token_at - receipt.sent_at) / sum(features(uncached, tokens))


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
        "ttft_s": since(receipt, receipt.first_token_at),
        "queue_s": since(receipt, receipt.sent_at),
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
    return since(receipt, first_at if first_at >= 0.0 else receipt.ended_at)


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
