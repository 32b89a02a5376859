"""Turn a receipt (core/explain/receipt.py) into JSON, with a sentence about the decision."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from forebay.proxy.core.explain.receipt import Receipt, Step
from forebay.proxy.core.model import INSTANT_S
from forebay.proxy.core.policy.routing import Option
from forebay.proxy.telemetry.record import CLIENT_GONE

AS_PREDICTED = 0.1  # share of the prediction: a larger difference is named
FAR_LATER = 1.5  # factor above the prediction: a later token makes the backend the reason
WAITS = {
    "turn": "it was behind earlier requests",
    "down": "its backend was down",
    "slots": "all slots of its backend were in use",
    "trial": "its backend was on trial after a failure, or had reported that it was full",
    "tokenizer": "the API server of its backend was tokenizing texts that came before",
    "line": "its backend was still processing earlier requests",
    "prefill_limit": "its bucket had its limit of prefills there (prefills_per_backend)",
    "leader": "another request was computing the same document there",
    "kv": "the KV cache had no room for it",
    "partition": "it is long, and its backend was reserved for short prompts",
}
HINDSIGHT = {
    "right": "Checked afterwards: right, the request would have been late.",
    "costs_another": "Checked afterwards: serving it would have made another request late.",
    "false": "Checked afterwards: this rejection was unnecessary.",
    "pending": "Not checked yet whether that was right.",
    "unjudged": "Not checked whether that was right: only a sample of the rejections is.",
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
    """Return the seconds in the queue by reason, up to now."""
    waits = dict(receipt.waits)
    if why := receipt.waiting_for:
        waits[why] = waits.get(why, 0.0) + now - receipt.wait_since
    return waits


def _predicted(receipt: Receipt) -> dict[str, Any]:
    chosen = receipt.chosen
    cached = chosen.matched_tokens if chosen else None
    return {
        "queue_s": _s(chosen.wait_s) if chosen else None,
        "ttft_s": _s(chosen.ttft_s) if chosen else None,
        "ttft_after_dispatch_s": _s(receipt.predicted_s) if receipt.tries else None,
        "cached_tokens": receipt.matched_tokens if receipt.tries else cached,
    }


def _actual(receipt: Receipt) -> dict[str, Any]:
    after_dispatch_s = None
    if receipt.first_token_at >= 0.0:
        after_dispatch_s = _s(receipt.first_token_at - receipt.sent_at)
    return {
        "backend": receipt.backend or None,
        "tries": receipt.tries,
        "queue_s": since(receipt, receipt.sent_at),
        "ttft_s": since(receipt, receipt.first_token_at),
        "ttft_after_dispatch_s": after_dispatch_s,
        "cached_tokens": receipt.cached_tokens if receipt.cached_tokens >= 0 else None,
        "prompt_tokens": receipt.engine_tokens or None,
        "output_tokens": receipt.output_tokens or None,
        "total_s": since(receipt, receipt.ended_at),
        "status": receipt.status or None,
        "error": receipt.reason or None,
    }


def verdict(receipt: Receipt, now: float) -> str:
    """Describe in a sentence or two what happened to the request, and why."""
    if receipt.state == "refused":
        return " ".join(filter(None, (_rejection(receipt), HINDSIGHT.get(receipt.hindsight))))
    parts = [_course(receipt, now)]
    if receipt.first_token_at >= 0.0:
        ttft_s = receipt.first_token_at - receipt.arrived_at
        parts.append(f"First token after {_spoken(ttft_s)}{_against(receipt, ttft_s)}.")
    for step in receipt.steps:
        if step.kind == "continued":
            parts.append(f"Continued on {step.backend} after {step.why} tokens.")
    if receipt.would is not None:
        parts.append(f"In mode shape it w{preview_verdict(receipt.would).removeprefix('W')}")
    if receipt.status >= 400:
        what = f" ({receipt.reason})" if receipt.reason else ""
        left = receipt.status == CLIENT_GONE
        parts.append("The client left first." if left else f"Answered {receipt.status}{what}.")
    return " ".join(parts)


def preview_verdict(receipt: Receipt) -> str:
    """Describe in a sentence or two what would happen to a request that has not been sent."""
    if receipt.state == "refused":
        return f"Would be rejected{_rejection(receipt).removeprefix('Rejected')}"
    assert receipt.chosen is not None
    where = f"{receipt.backend}{_why_there(receipt)}"
    first = f"First token predicted after {_spoken(receipt.chosen.ttft_s)}."
    if receipt.rule == "idle":
        first += " That is over its limit, but an idle backend rejects no request."
    if receipt.state == "queued":
        return f"Would wait for {where}, because {WAITS[receipt.waiting_for]}. {first}"
    return f"Would be sent at once to {where}. {first}"


def main_reason(receipt: Receipt) -> str:
    """Return in a few words what took most of the time, or why the request was rejected."""
    if receipt.state == "refused":
        return _rejection(receipt).rstrip(".")
    if receipt.first_token_at < 0.0 or receipt.sent_at < 0.0:
        return _why_no_token(receipt)
    failed = [step.backend for step in receipt.steps if step.kind == "failed"]
    if failed:
        return f"{', '.join(failed)} failed; sent again to {receipt.backend}"
    # The queue, or a backend that was far slower than predicted.
    queued_s = receipt.sent_at - receipt.arrived_at
    after_s = receipt.first_token_at - receipt.sent_at
    waits = receipt.waits
    if queued_s >= after_s and waits:
        return f"waited {_spoken(queued_s)}: {_why_waited(waits)}"
    predicted_s = receipt.predicted_s  # on dispatch
    if receipt.chosen is not None and receipt.chosen.backend == receipt.backend:
        predicted_s = min(predicted_s, receipt.chosen.ttft_s)
    if after_s > FAR_LATER * predicted_s + INSTANT_S:
        return f"{receipt.backend} took {_spoken(after_s)}; {_spoken(predicted_s)} predicted"
    # Else its own prefill.
    tokens = receipt.engine_tokens or receipt.prompt_tokens
    cached = f", {receipt.cached_tokens:,} cached" if receipt.cached_tokens >= 0 else ""
    what = f"its prompt of {tokens:,} tokens{cached}"
    if abs(after_s - predicted_s) <= AS_PREDICTED * predicted_s + INSTANT_S:
        return f"{what}, as predicted"
    times = after_s / max(predicted_s, 1e-9)
    return f"{what}, on {receipt.backend}: {times:.1f} times as long as predicted"


def _why_waited(waits: Mapping[str, float]) -> str:
    """Name the longest wait. After a wait for its turn, name the wait at the queue's head too.

    The requests before it mostly waited for the same.
    """
    longest = max(waits, key=lambda why: waits[why])
    first = {why: seconds for why, seconds in waits.items() if why != "turn" and seconds > 0.0}
    if longest != "turn" or not first:
        return WAITS[longest]
    return f"{WAITS['turn']}, and then {WAITS[max(first, key=lambda why: first[why])]}"


def _why_no_token(receipt: Receipt) -> str:
    if receipt.state == "left" or receipt.status == CLIENT_GONE:
        return f"the client left{_because(receipt, receipt.ended_at)}"
    if receipt.status >= 400:
        what = f" ({receipt.reason})" if receipt.reason else ""
        return f"answered {receipt.status}{what}, no first token"
    return "not a stream: its first token is not visible"


def _course(receipt: Receipt, now: float) -> str:
    if receipt.state == "left":
        after = _spoken(receipt.ended_at - receipt.arrived_at)
        return f"The client left after {after} in the queue{_because(receipt, now)}."
    if receipt.state == "queued":
        return f"Waiting for {_spoken(now - receipt.arrived_at)}{_because(receipt, now)}."
    where = f"{receipt.backend}{_why_there(receipt)}"
    failed = [step.backend for step in receipt.steps if step.kind == "failed"]
    if failed:
        where += f", after {', '.join(failed)} had failed"
    queued_s = receipt.sent_at - receipt.arrived_at
    if queued_s < 0.0005:
        return f"Sent at once to {where}."
    return f"Waited {_spoken(queued_s)}{_because(receipt, now)}; then sent to {where}."


def _why_there(receipt: Receipt) -> str:
    """Return why that backend was chosen, or "" without a choice."""
    chosen, options = receipt.chosen, receipt.options
    if chosen is None or len(options) < 2:
        return ""
    if chosen.backend != receipt.backend:
        return f", which had room before {chosen.backend}, its first choice"
    most = max(option.matched_tokens for option in options)
    if chosen.matched_tokens == most and most * 4 >= receipt.prompt_tokens:
        return f", which had {most:,} of its {receipt.prompt_tokens:,} tokens cached"
    if chosen.ttft_s == min(option.ttft_s for option in options):
        if all(option.ttft_s == chosen.ttft_s for option in options):
            return ", which had the least recent load"
        return ", where the first token was expected soonest"
    if not chosen.proven:
        return ", where the time of prompts of this size is not known yet"
    return ", the choice of the routing (see the candidates)"


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
        text += f"; too late: the target was {_spoken(receipt.target_s)}"
    return text


def _too_late(receipt: Receipt) -> str:
    assert receipt.chosen is not None
    limit = f"the target of bucket {receipt.bucket} is {_spoken(receipt.limit)}"
    if receipt.rule == "timeout":
        limit = f"the client waits {_spoken(receipt.limit)}"
    return (
        f"Rejected at once: first token predicted after {_spoken(receipt.chosen.ttft_s)}, "
        f"{_spoken(receipt.value)} with the safety margin; {limit}."
    )


def _rejection(receipt: Receipt) -> str:
    value, limit, bucket = receipt.value, receipt.limit, receipt.bucket
    waited_s = receipt.ended_at - receipt.arrived_at
    match receipt.rule:
        # Rules that reject on arrival.
        case "max_wait":
            assert receipt.chosen is not None
            shortened = limit + receipt.chosen.prefill_s < receipt.target_s
            return (
                f"Rejected at once: predicted wait {_spoken(receipt.chosen.wait_s)}, "
                f"{_spoken(value)} with the safety margin; "
                f"the limit of bucket {bucket} is {_spoken(limit)}"
                + (
                    " for new requests while its queue stands or clients come back."
                    if shortened
                    else "."
                )
            )
        case "target" | "timeout":
            return _too_late(receipt)
        case "line_full":
            if receipt.tries:
                return f"Its backend failed, and the queue of bucket {bucket} was full."
            return (
                f"Rejected at once: {value:.0f} requests of bucket {bucket} were waiting; "
                f"the limit is {limit:.0f}."
            )
        case "tenant_share":
            return f"Rejected at once: its tenant used its share of the queue of bucket {bucket}."
        case "tenant_quota":
            return f"Rejected at once: its tenant's quota is used up for {_spoken(value)} more."
        case "prompt_too_long":
            return f"Rejected: it has {value:,.0f} tokens; the largest bucket allows {limit:,.0f}."
        # Rules that also reject a request that has waited or run.
        case "no_backend":
            if receipt.tries:
                return "Its backend failed, and no other one that it may use was up."
            late = f" after {_spoken(waited_s)} in the queue" if waited_s > 0 else " at once"
            return f"Rejected{late}: no backend that it may use was up."
        case "deadline_passed":
            because = _because(receipt, receipt.ended_at)
            return f"Rejected after {_spoken(waited_s)} in the queue, its limit{because}."
        case "gave_way":
            return (
                f"Rejected after {_spoken(waited_s)} in the queue: the queue of bucket {bucket} "
                "was full, and a request that is more urgent, or of a tenant with less, came."
            )
        case "no_time":
            return "Its backend failed, and no time was left for another one."
    raise AssertionError(receipt.rule)


def _candidate(option: Option, receipt: Receipt) -> dict[str, Any]:
    mean_load = sum(other.load for other in receipt.options) / len(receipt.options)
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
        "mean_load_tokens": round(mean_load),
    }


def _step(step: Step, receipt: Receipt) -> dict[str, Any]:
    at_s = _s(step.at - receipt.arrived_at)
    return {"at_s": at_s, "event": step.kind, "backend": step.backend or None, "why": step.why}


def since(receipt: Receipt, at: float) -> float | None:
    """Return the seconds from the arrival to a time, or None if that has not come."""
    return None if at < 0.0 else _s(at - receipt.arrived_at)


def _s(seconds: float) -> float | None:
    """Round for JSON. Infinity becomes None."""
    return None if seconds == inf else round(seconds, 6)


def _spoken(seconds: float) -> str:
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
