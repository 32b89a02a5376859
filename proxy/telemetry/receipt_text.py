"""A receipt (core/receipt.py) as JSON, with one sentence that says what happened and why."""

from collections.abc import Sequence
from math import inf
from typing import Any

from forebay.proxy.core.explain.receipt import Receipt, Step
from forebay.proxy.core.policy.routing import Option

WAITS = {
    "turn": "others were in front of it",
    "down": "its backend was down",
    "slots": "every slot of its backend was taken",
    "trial": "its backend was on trial after a failure, or had said that it was full",
    "line": "its backend was busy with what it had been sent",
    "prefill_limit": "its bucket's limit of prefills was reached there (prefills_per_backend)",
    "leader": "another request was computing the same document there",
    "kv": "the KV cache had no room for it",
    "partition": "it is long, and this was the last engine clear of long prefills",
    "policy": "another rule of the policy held it back",
}
HINDSIGHT = {
    "right": "In hindsight that was right: it would have been late.",
    "displacing": "In hindsight it would have been in time, but only in the place of another.",
    "false": "In hindsight that was wrong: it would have been in time, at nobody's expense.",
    "pending": "Whether that was right cannot be said yet.",
    "unjudged": "Nobody looked whether that was right: a sample of the refusals is followed.",
}
STATES = {
    "queued": "waiting",
    "prefilling": "sent, and without a first token",
    "streaming": "streaming",
}


def receipt_fields(
    receipt: Receipt, now: float, keep: int, same_id: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the JSON of `/status?request=`.

    Args:
        keep: number of ended requests that are remembered.
        same_id: other requests whose client sent the same id.
    """
    return {
        "request": receipt.id,
        "same_id": list(same_id),
        "kept": keep,
        "verdict": verdict(receipt, now),
        "state": receipt.state,
        "age_s": _s(now - receipt.arrived_at),
        "bucket": receipt.bucket or None,
        "service_class": receipt.service_class,
        "tenant": receipt.tenant or None,
        "prompt_tokens": receipt.prompt_tokens,
        "streams": receipt.streams,
        "limits": {
            "max_wait_s": _s(receipt.max_wait_s),
            "client_timeout_s": _s(receipt.timeout_s),
            "first_token_s": _s(receipt.target_s),
        },
        "decision": {
            "rule": receipt.rule,
            "value": _s(receipt.value) if receipt.limit < inf else None,
            "limit": _s(receipt.limit),
            "waiting_in_bucket": max(0, receipt.queued),
        },
        "candidates": [_candidate(option, receipt) for option in receipt.options],
        "timeline": [_step(step, receipt) for step in receipt.steps],
        "waited": {
            why: _s(seconds) for why, seconds in _waits(receipt, now).items() if seconds > 0.0
        },
        "predicted": _predicted(receipt),
        "actual": _actual(receipt),
        "hindsight": receipt.hindsight or None,
    }


def _waits(receipt: Receipt, now: float) -> dict[str, float]:
    """Return the seconds in the queue by reason, those until now included."""
    waits = dict(receipt.waits)
    if why := receipt.waiting_for:
        waits[why] = waits.get(why, 0.0) + now - receipt.wait_since
    return waits


def _predicted(receipt: Receipt) -> dict[str, Any]:
    chosen = receipt.chosen
    return {
        "queue_s": _s(chosen.wait_s) if chosen else None,
        "ttft_s": _s(chosen.ttft_s) if chosen else None,
        "ttft_after_dispatch_s": _s(receipt.predicted_s) if receipt.tries else None,
        "cached_tokens": _predicted_cached_tokens(receipt),
    }


def _actual(receipt: Receipt) -> dict[str, Any]:
    after_dispatch_s = None
    if receipt.first_token_at >= 0.0:
        after_dispatch_s = _s(receipt.first_token_at - receipt.sent_at)
    return {
        "backend": receipt.backend or None,
        "tries": receipt.tries,
        "queue_s": _since(receipt, receipt.sent_at),
        "ttft_s": _since(receipt, receipt.first_token_at),
        "ttft_after_dispatch_s": after_dispatch_s,
        "cached_tokens": receipt.cached_tokens if receipt.cached_tokens >= 0 else None,
        "prompt_tokens": receipt.engine_tokens or None,
        "output_tokens": receipt.output_tokens or None,
        "total_s": _since(receipt, receipt.ended_at),
        "status": receipt.status or None,
        "error": receipt.reason or None,
    }


def verdict(receipt: Receipt, now: float) -> str:
    """What became of the request and why, in a sentence or two."""
    if receipt.state == "refused":
        return " ".join(filter(None, (_refusal(receipt), HINDSIGHT.get(receipt.hindsight))))
    parts = [_way(receipt, now)]
    if receipt.first_token_at >= 0.0:
        ttft_s = receipt.first_token_at - receipt.arrived_at
        parts.append(f"First token after {_spoken(ttft_s)}{_against(receipt, ttft_s)}.")
    if receipt.status >= 400:
        what = f" ({receipt.reason})" if receipt.reason else ""
        left = receipt.status == 499
        parts.append("Its client left first." if left else f"Answered {receipt.status}{what}.")
    return " ".join(parts)


def _way(receipt: Receipt, now: float) -> str:
    if receipt.state == "left":
        after = _spoken(receipt.ended_at - receipt.arrived_at)
        return f"Its client left after {after} in the queue{_because(receipt, now)}."
    if receipt.state == "queued":
        return f"Waiting for {_spoken(now - receipt.arrived_at)}{_because(receipt, now)}."
    where = f"{receipt.backend}{_why_there(receipt)}"
    failed = [step.backend for step in receipt.steps if step.kind == "failed"]
    if failed:
        where += f", after {', '.join(failed)} had failed"
    if receipt.pieces:
        count = "a piece" if receipt.pieces == 1 else f"{receipt.pieces} pieces"
        where += f", {count} of its prompt first"
    queued_s = receipt.sent_at - receipt.arrived_at
    if queued_s < 0.0005:
        return f"Sent at once to {where}."
    return f"Waited {_spoken(queued_s)}{_because(receipt, now)}; then sent to {where}."


def _why_there(receipt: Receipt) -> str:
    """Why that backend; nothing where there was no choice."""
    chosen, options = receipt.chosen, receipt.options
    if chosen is None or len(options) < 2:
        return ""
    if chosen.backend != receipt.backend:
        return f", which had room before {chosen.backend}, for which it was meant"
    most = max(option.matched_tokens for option in options)
    if chosen.matched_tokens == most and most * 4 >= receipt.prompt_tokens:
        return f", which held {most:,} of its {receipt.prompt_tokens:,} tokens"
    if chosen.ttft_s == min(option.ttft_s for option in options):
        if all(option.ttft_s == chosen.ttft_s for option in options):
            return ", which had been sent the least"
        return ", where its first token was expected soonest"
    if not chosen.proven:
        return ", of which nobody knows yet how long prompts of this size take there"
    return ", which the routing preferred (see the candidates)"


def _because(receipt: Receipt, now: float) -> str:
    waits = _waits(receipt, now)
    if not waits:
        return ""
    longest = max(waits, key=lambda why: waits[why])
    rest_s = sum(waits.values()) - waits[longest]
    mostly = f", {_spoken(waits[longest])} of it" if rest_s > 0.05 * waits[longest] else ""
    return f"{mostly} because {WAITS[longest]}"


def _against(receipt: Receipt, ttft_s: float) -> str:
    if receipt.chosen is None:
        return ""
    text = f"; predicted on arrival: {_spoken(receipt.chosen.ttft_s)}"
    if ttft_s > receipt.target_s:
        text += f"; too late: taken for {_spoken(receipt.target_s)} at most"
    return text


def _refusal(receipt: Receipt) -> str:
    value, limit, bucket = receipt.value, receipt.limit, receipt.bucket
    waited_s = receipt.ended_at - receipt.arrived_at
    match receipt.rule:
        case "max_wait":
            assert receipt.chosen is not None
            return (
                f"Refused at once: it would have waited {_spoken(value)} "
                f"({_spoken(receipt.chosen.wait_s)} predicted, the rest margin), "
                f"and bucket {bucket} allows {_spoken(limit)}."
            )
        case "timeout":
            assert receipt.chosen is not None
            return (
                f"Refused at once: its first token was expected after "
                f"{_spoken(receipt.chosen.ttft_s)}, {_spoken(value)} with margin, "
                f"and its client waits {_spoken(limit)}."
            )
        case "line_full":
            if receipt.tries:
                return f"Its backend failed, and the line of bucket {bucket} was full."
            return (
                f"Refused at once: {value:.0f} requests of bucket {bucket} waited already, "
                f"and {limit:.0f} may."
            )
        case "tenant_share":
            return f"Refused at once: its tenant has its share of the line of bucket {bucket}."
        case "tenant_quota":
            return f"Refused at once: its tenant's quota is used up for {_spoken(value)} more."
        case "prompt_too_long":
            return f"Refused: it has {value:,.0f} tokens, and the last bucket takes {limit:,.0f}."
        case "no_backend":
            if receipt.tries:
                return "Its backend failed, and no other that may take it was up."
            late = f" after {_spoken(waited_s)} in the queue" if waited_s > 0 else " at once"
            return f"Refused{late}: no backend that may take it was up."
        case "deadline_passed":
            because = _because(receipt, receipt.ended_at)
            return f"Refused after {_spoken(waited_s)} in the queue, its limit{because}."
        case "gave_way":
            return (
                f"Refused after {_spoken(waited_s)} in the queue: the line of bucket {bucket} "
                "was full, and somebody more urgent or with less in it came."
            )
        case "no_time":
            return "Its backend failed, and there was no time left to ask another."
    raise AssertionError(receipt.rule)


def _candidate(option: Option, receipt: Receipt) -> dict[str, Any]:
    return {
        "backend": option.backend,
        "chosen": option is receipt.chosen,
        "wait_s": _s(option.wait_s),
        "margin_s": _s(option.margin_s),
        "prefill_s": _s(option.prefill_s),
        "cold_prefill_s": _s(option.cold_prefill_s),
        "ttft_s": _s(option.ttft_s),
        "proven": option.proven,
        "matched_tokens": option.matched_tokens,
        "load_tokens": round(option.load),
        "mean_load_tokens": round(option.mean_load),
    }


def _step(step: Step, receipt: Receipt) -> dict[str, Any]:
    at_s = _s(step.at - receipt.arrived_at)
    return {"at_s": at_s, "event": step.kind, "backend": step.backend or None, "why": step.why}


def _predicted_cached_tokens(receipt: Receipt) -> int | None:
    if receipt.tries:
        return receipt.matched_tokens
    return receipt.chosen.matched_tokens if receipt.chosen else None


def _since(receipt: Receipt, at: float) -> float | None:
    return None if at < 0.0 else _s(at - receipt.arrived_at)


def _s(seconds: float) -> float | None:
    """JSON has no infinity."""
    return None if seconds == inf else round(seconds, 6)


def _spoken(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
