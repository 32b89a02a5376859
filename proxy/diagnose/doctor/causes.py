"""Find the causes of rejections and waits: a tenant, long documents, a scarce resource.

Each function yields findings like the functions of `checks`. The remedy of a cause is the remedy of
the rejections. Only without a known cause are more GPUs the answer.
"""

from forebay.proxy.diagnose.doctor.around import event_loop
from forebay.proxy.diagnose.doctor.finding import SOME, Found
from forebay.proxy.diagnose.doctor.servers import lost_models, speeds, states
from forebay.proxy.diagnose.scene import Scene

MANY = 0.05  # share of the admitted requests, or of the waiting time for one reason
LARGE = 0.2  # share of the waiting time that makes its reason the cause
MOST = 0.8
"""Share of the rejections that makes a tenant or a bucket the cause."""
FEW_REJECTED = 2.0


def floods(scene: Scene) -> Found:
    """No tenant floods the proxy."""
    name = "forebay_tenant_requests_total"
    requests, rejected = (scene.by(name, "tenant", **at) for at in ({}, {"status": "429"}))
    total, lost = sum(requests.values()), sum(rejected.values())
    if len(requests) < 2 or lost <= max(FEW_REJECTED, SOME * total):
        return
    tenant, most = next(iter(rejected.items()))
    sent = requests[tenant]
    if tenant != "none" and sent >= total / 2 and most >= MOST * lost:
        sheds = any(status["shedding_classes"] for status in scene.statuses())
        yield (
            "error" if sheds else "warning",  # then others are rejected for this flood
            f"tenant {tenant} sent {sent / total:.0%} of the requests ({sent:.0f} of {total:.0f}) "
            f"and had {most / lost:.0%} of the rejections ({most:.0f} of {lost:.0f})",
            f"set a quota (tenants.known.{tenant}.tokens_per_s); more GPUs would serve this flood "
            "only",
        )


def kv_full(scene: Scene) -> Found:
    """Requests wait for prefills, not for room in the KV caches."""
    # Compare the time that requests waited for KV cache with all their waiting.
    waits = scene.by("forebay_wait_seconds_total", "reason")
    behind_s = waits.pop("behind_others", 0.0)  # the requests in front wait for the cause
    kept_s, all_s = waits.get("kv_full", 0.0), sum(waits.values())
    if kept_s < max(1.0, LARGE * all_s):
        return
    text = (
        f"requests waited {kept_s:.0f} s for room in the KV cache, {kept_s / all_s:.0%} of all "
        "time in the queue"
    )
    # Add the requests behind them, and the fullest cache.
    if behind_s:
        text += f", and others {behind_s:.0f} s behind them"
    reserved = {
        name: (backend.get("kv_reserved_tokens", 0) / backend["kv_tokens"], backend["kv_tokens"])
        for name, backend in scene.backends().items()
        if backend.get("kv_tokens")
    }
    if reserved:
        fullest = max(reserved, key=lambda name: reserved[name][0])
        share, tokens = reserved[fullest]
        text += f"; {fullest} has {tokens:,.0f} tokens, {share:.0%} of them reserved now"
    yield (
        "warning",
        text,
        "give vLLM more KV cache (--gpu-memory-utilization, --kv-cache-dtype fp8) or add a GPU; "
        "`forebay kv` says what fits",
    )


def document_stream(scene: Scene) -> Found:
    """No stream of long prompts takes more prefill than the backends can give."""
    name = "forebay_backend_time_to_first_token_seconds"
    taken_s, counts = scene.by(f"{name}_sum", "bucket"), scene.by(f"{name}_count", "bucket")
    if len(taken_s) < 2:
        return
    bucket, seconds = next(iter(taken_s.items()))
    count, total = counts.get(bucket, 0.0), sum(counts.values())
    rejected = scene.total("forebay_rejects_total", bucket=bucket)
    answered = scene.total("forebay_responses_total", bucket=bucket)
    rare = count and count < total / 2 and seconds >= sum(taken_s.values()) / 2
    mine = rejected >= MOST * scene.total("forebay_rejects_total")
    if rare and mine and rejected > max(FEW_REJECTED, SOME * answered):
        yield (
            "warning",
            f"bucket {bucket}: {count:.0f} of {total:.0f} requests took "
            f"{seconds / sum(taken_s.values()):.0%} of the time to first tokens "
            f"({seconds / count:.1f} s each), and {rejected:.0f} more were rejected",
            "these prompts need more prefill than there is: add a GPU (`forebay size` says how "
            "many), or set a quota for the tenant that sends them",
        )


REJECTION_REMEDIES = {
    "queue_full": "add a GPU (`forebay size` says how many), or raise max_queue",
    "deadline_unattainable": "add a GPU (`forebay size` says how many), or raise the target",
    "no_backend_available": "start a backend",
    "tenant_quota": "raise the tenant's tokens_per_s, _hour or _day, or let it wait",
    "tenant_concurrency": "raise the tenant's max_concurrency, or let it wait",
    "prompt_too_long": "raise up_to of the last bucket, if the backends take longer prompts",
}


def rejections(scene: Scene) -> Found:
    """Few requests are rejected, and no request without need."""
    # Too many rejections: the remedy is the remedy of their cause.
    reasons = scene.by("forebay_rejects_total", "reason")
    rejected = sum(reasons.values())
    answered = scene.total("forebay_responses_total")
    if rejected > max(1.0, SOME * answered):
        counts = ", ".join(f"{count:.0f} {reason}" for reason, count in reasons.items())
        yield (
            "warning",
            f"{rejected:.0f} of {max(answered, rejected):.0f} requests were rejected: {counts}",
            _remedy(scene, next(iter(reasons))),
        )
    # Too many rejections that hindsight calls unnecessary.
    verdicts = scene.by("forebay_refusals_in_hindsight_total", "verdict")
    judged = sum(count for verdict, count in verdicts.items() if verdict != "unjudged")
    needless = verdicts.get("false", 0.0)
    if needless > max(1.0, MANY * judged):
        yield (
            "warning",
            f"{needless:.0f} of {judged:.0f} rejections that were checked afterwards were "
            "unnecessary",
            "this passes with new traffic after a slow backend has recovered; else read "
            "`forebay explain --rejected`",
        )


def _remedy(scene: Scene, reason: str) -> str:
    """Return the remedy of the cause of rejections, or of their reason if no cause is found."""
    if reason in ("queue_full", "deadline_unattainable"):
        for check in (states, lost_models, speeds, floods, kv_full, event_loop, document_stream):
            for _, text, remedy in check(scene):
                first = text.partition(" ")[0]
                return f"{first}: {remedy}" if first in scene.backends() else remedy
    return REJECTION_REMEDIES.get(reason, "read `forebay explain --rejected`")
