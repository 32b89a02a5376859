"""Keep a record of each decision. The recorder observes the policy and decides nothing.

Rules that decide about a new request. All but the first two have a value and a limit:

 starts, queues     admitted: it meets its target, as predicted
 idle               admitted though it would not: an idle backend rejects no request
 max_wait           rejected: predicted wait and margin, against the bucket's `max_wait`, or half of
                    its target while its queue stands
 target             rejected: these and its prefill, against the bucket's `target`
 timeout            rejected: these and its prefill, against the client's own limit
 line_full          rejected: waiting requests of the bucket, against `max_queue`
 tenant_share       rejected: its tenant holds as much of the queue as leaves others room
 tenant_quota       rejected: seconds until the tenant's quota has room for it
 prompt_too_long    rejected: its tokens, against `up_to` of the last bucket
 no_backend         rejected: no backend that may take it is up
 observed           sent at once, as every request is; `would` has the decision of mode shape

Rules for a request that was admitted and is rejected after all: `deadline_passed` in the queue,
`gave_way` to a more urgent request in a full queue, or `no_time`, `line_full` or `no_backend` after
its backend had failed.
"""

from collections.abc import Mapping

from forebay.proxy.core.explain.hindsight import Hindsight
from forebay.proxy.core.explain.receipt import Receipt, Receipts
from forebay.proxy.core.model import Bucket, Reject, RejectReason, Request, Send
from forebay.proxy.core.policy.admission import Placement, attainable, in_time_wait_s
from forebay.proxy.core.policy.start import StartGate
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import heads_of
from forebay.proxy.core.state.queue import QueuedRequest


class DecisionRecorder:
    """Writes `receipts`: of requests in progress, and of the last `keep` that have ended.

    Args:
        on: False opens no receipt, so no later event finds one.
    """

    def __init__(self, keep: int, *, on: bool = True) -> None:
        self.receipts = Receipts(keep)
        self._on = on
        self._under_way = self.receipts.under_way

    def watch(
        self, gate: StartGate, backends: Mapping[str, Backend], buckets: Mapping[str, Bucket]
    ) -> None:
        """Look at this gate, and at these backends and buckets, from now on."""
        self._gate = gate
        self.hindsight = Hindsight(self.receipts, gate, backends, buckets)

    # Time.

    def time_passes(self, now: float) -> None:
        """Judge the rejections that can be judged by now."""
        if self.hindsight.watches:
            self.hindsight.time_passes(now)

    # Arrival.

    def rejected_early(self, reject: Reject, last: Bucket, now: float) -> None:
        """Record a rejection without a forecast: too long, or over quota."""
        if not self._on:
            return
        receipt = self.receipts.open(reject.request, reject.bucket, now)
        note_early_rejection(receipt, reject, last)
        self._refuse(receipt, now)

    def decided(
        self,
        waiting: QueuedRequest,
        bucket: Bucket,
        place: Placement,
        reason: RejectReason | None,
        now: float,
    ) -> None:
        """Record the decision about a new request. `reason` is None if it is admitted."""
        if not self._on:
            return
        request = waiting.request
        receipt = self.receipts.open(request, bucket.name, now)
        note_decision(receipt, request, bucket, place, reason)
        if reason is None:
            if self.hindsight.watches:
                self.hindsight.admitted(request, place.limits, place.options, place.queued)
            return
        self._refuse(receipt, now)
        if receipt.rule != "tenant_share":
            self.hindsight.rejected(waiting, receipt, bucket, place.option, now)

    def observed(self, request: Request, bucket: Bucket, now: float) -> None:
        """Record a request that is sent at once."""
        if self._on:
            self.receipts.open(request, bucket.name, now).rule = "observed"

    def foreseen(self, request_id: str, would: Receipt) -> None:
        """Record what mode shape would do with a request that is sent at once."""
        receipt = self._under_way.get(request_id)
        if receipt is not None:
            receipt.would = would
            receipt.options = would.options
            receipt.max_wait_s, receipt.target_s = would.max_wait_s, would.target_s

    def foreseen_end(self, bucket: str, would: Receipt) -> None:
        """Count by which rule mode shape would send or reject a request."""
        counts = self.receipts.tally(bucket).observed
        counts[would.rule] = counts.get(would.rule, 0) + 1

    # Waiting.

    def queued(self, waiting: QueuedRequest, backend: Backend, now: float) -> None:
        """Record that a request waits for a backend, and why."""
        receipt = self._under_way.get(waiting.request.id)
        if receipt is not None:
            why = "turn"
            if waiting in heads_of([backend]):
                why = self._gate.why_not(backend, waiting, now) or "turn"
            receipt.waits_for(why, now)
            receipt.step(now, "queued", backend.name, why)

    def waits(self, backend: Backend, now: float) -> None:
        """Record why the heads of a backend's queues still wait."""
        for head in heads_of([backend]) if self._on else ():
            receipt = self._under_way.get(head.request.id)
            if receipt is not None:
                why = self._gate.why_not(backend, head, now) or "turn"
                if why != receipt.waiting_for:
                    receipt.waits_for(why, now)

    def rejected(self, reject: Reject, now: float) -> None:
        """Record a rejection without backends, or of a request that was admitted before."""
        if not self._on:
            return
        receipt = self._under_way.get(reject.request.id)
        if receipt is not None and receipt.first_token_at >= 0.0:  # its stream is cut
            self.finished(reject.request.id, now)
            return
        if receipt is None:
            receipt = self.receipts.open(reject.request, reject.bucket, now)
            receipt.rule = "no_backend"
        else:
            receipt.rule = _late_rule(receipt, reject.reason, now)
            self.receipts.tally(receipt.bucket).admitted["refused"] += 1
        self._refuse(receipt, now)

    def outgrew(self, reject: Reject, last: Bucket, now: float) -> None:
        """Record the rejection of a waiting request that no bucket holds any longer."""
        receipt = self._under_way.get(reject.request.id)
        if receipt is not None:
            self.receipts.tally(receipt.bucket).admitted["refused"] += 1
            _too_long(receipt, last.up_to)
            self._refuse(receipt, now)

    def cancelled(self, request_id: str, now: float) -> None:
        """Record that a client left while its request waited."""
        receipt = self._under_way.get(request_id)
        if receipt is not None and receipt.first_token_at >= 0.0:
            self.finished(request_id, now)
        elif receipt is not None:
            self.receipts.tally(receipt.bucket).admitted["unanswered"] += 1
            receipt.step(now, "left")
            self.receipts.close(receipt, "left", now)

    # Running.

    def starts(self, waiting: QueuedRequest, backend: Backend, now: float) -> None:
        """Look at a request that is about to be sent, before any state changes."""
        if self.hindsight.watches:
            self.hindsight.starts(waiting, backend, now)

    def sent(self, send: Send, now: float) -> None:
        """Record that a request was sent."""
        receipt = self._under_way.get(send.request.id)
        if receipt is not None and receipt.first_token_at >= 0.0:
            done = send.request.prompt_tokens - receipt.prompt_tokens
            receipt.waits_for("", now)
            receipt.step(now, "continued", send.backend, str(done))
        elif receipt is not None:
            receipt.waits_for("", now)
            receipt.step(now, "sent", send.backend)
            receipt.state = "prefilling"
            receipt.backend = send.backend
            receipt.sent_at = now
            receipt.tries += 1
            receipt.matched_tokens = send.matched_tokens
            receipt.predicted_s = send.predicted_ttft_s

    def failed(self, request_id: str, now: float) -> None:
        """Record that a backend failed before the first byte."""
        receipt = self._under_way.get(request_id)
        if receipt is not None:
            receipt.step(now, "failed", receipt.backend)
            receipt.state = "queued"

    def first_token(self, request_id: str, now: float) -> None:
        """Record the first token and how far it was from the promise and the prediction."""
        receipt = self._under_way.get(request_id)
        if receipt is None or receipt.first_token_at >= 0.0:
            return
        receipt.first_token_at = now
        receipt.state = "streaming"
        receipt.step(now, "first_token", receipt.backend)
        tally, ttft_s = self.receipts.tally(receipt.bucket), now - receipt.arrived_at
        tally.admitted["met" if ttft_s <= receipt.target_s else "missed"] += 1
        if receipt.chosen is not None and receipt.tries == 1:
            tally.first_token(ttft_s, receipt.chosen.ttft_s)

    def used(
        self, request_id: str, output_tokens: int, cached_tokens: int | None, prompt_tokens: int
    ) -> None:
        """Record the usage that an answer reports."""
        receipt = self._under_way.get(request_id)
        if receipt is not None:
            receipt.output_tokens = output_tokens
            receipt.engine_tokens = prompt_tokens
            receipt.cached_tokens = -1 if cached_tokens is None else cached_tokens

    def finished(self, request_id: str, now: float) -> None:
        """Record the end of a request that was sent."""
        receipt = self._under_way.get(request_id)
        if receipt is not None:
            if receipt.first_token_at < 0.0:
                outcome = "unanswered" if receipt.streams else "not_streamed"
                self.receipts.tally(receipt.bucket).admitted[outcome] += 1
            receipt.step(now, "ended", receipt.backend)
            self.receipts.close(receipt, "ended", now)

    def _refuse(self, receipt: Receipt, now: float) -> None:
        receipt.step(now, "refused", "", receipt.rule)
        self.receipts.close(receipt, "refused", now)


def note_early_rejection(receipt: Receipt, reject: Reject, last: Bucket) -> None:
    """Note why a request is rejected without a forecast. `last` has the longest prompts."""
    if reject.reason == "tenant_quota":
        receipt.rule = "tenant_quota"
        receipt.value = reject.retry_after_s
        receipt.limit = 0.0
    else:
        _too_long(receipt, last.up_to)


def note_decision(
    receipt: Receipt,
    request: Request,
    bucket: Bucket,
    place: Placement,
    reason: RejectReason | None,
) -> None:
    """Note the forecast, the decision and its rule. `reason` is None if it is admitted."""
    limits, option, queued = place.limits, place.option, place.queued
    receipt.options = place.options
    receipt.chosen = option
    receipt.queued = queued
    receipt.max_wait_s = limits.max_wait_s
    receipt.target_s = in_time_wait_s(request, bucket, option.prefill_s) + option.prefill_s
    if reason is None:
        receipt.rule = "starts" if queued < 0 else "queues"
        if not attainable(request, limits, option):
            receipt.rule = "idle"
        return
    receipt.rule = "tenant_share"
    if queued >= bucket.max_queue:
        receipt.rule = "line_full"
        receipt.value, receipt.limit = float(queued), float(bucket.max_queue)
    elif reason == "deadline_unattainable":
        wait_s = option.wait_s + option.margin_s
        ttft_s = wait_s + option.prefill_s
        if wait_s > limits.max_wait_s:
            receipt.rule, receipt.value, receipt.limit = "max_wait", wait_s, limits.max_wait_s
        elif ttft_s > request.timeout_s:
            receipt.rule, receipt.value, receipt.limit = "timeout", ttft_s, request.timeout_s
        else:
            receipt.rule, receipt.value, receipt.limit = "target", ttft_s, bucket.target_s


def _too_long(receipt: Receipt, most_tokens: int) -> None:
    receipt.rule = "prompt_too_long"
    receipt.value = float(receipt.prompt_tokens)
    receipt.limit = float(most_tokens)


def _late_rule(receipt: Receipt, reason: RejectReason, now: float) -> str:
    """Return the rule by which an admitted request is rejected after all."""
    if reason == "no_backend_available":
        return "no_backend"
    if receipt.tries:
        return "no_time" if reason == "deadline_unattainable" else "line_full"
    if reason == "queue_full" and receipt.arrived_at == now:
        return "line_full"  # it could have started, but stands behind its own tenant's requests
    return "gave_way" if reason == "queue_full" else "deadline_passed"
