"""A shaper that keeps a receipt of each decision. It decides exactly as one that does not.

Rules by which a newcomer is decided on; each but the plain ones has a value and a limit:

 starts, queues     taken: it makes its target, by the prediction
 idle               taken though it would not: an idle backend refuses nobody
 max_wait           refused: predicted wait and margin, against the bucket's `max_wait`
 timeout            refused: the same and its prefill, against the client's own limit
 line_full          refused: requests of the bucket that wait, against `max_queue`
 tenant_share       refused: its tenant has as much of the line as leaves the others room
 tenant_quota       refused: seconds until the tenant's quota has room for it
 prompt_too_long    refused: its tokens, against those of the last bucket
 no_backend         refused: none that may take it is up

and of one who was taken and is refused after all: `deadline_passed` in the queue, `gave_way` to
somebody more urgent in a full line, or after its backend had failed `no_time`, `line_full` or
`no_backend`.
"""

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from forebay.proxy.core.explain.hindsight import Hindsight
from forebay.proxy.core.explain.receipt import Receipt, Receipts
from forebay.proxy.core.model import (
    Action,
    BackendSpec,
    Bucket,
    Reject,
    RejectReason,
    Request,
    Send,
    Tenant,
)
from forebay.proxy.core.policy.admission import Admit, attainable, refuse
from forebay.proxy.core.policy.routing import Affinity, Option, Route, warm_or_least_work
from forebay.proxy.core.policy.start import Block, blocked_by
from forebay.proxy.core.shaper import DISPATCH_AHEAD_S, Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.fleet import heads_of
from forebay.proxy.core.state.queue import Waiting

KEEP: Final = 2_000


class ExplainedShaper(Shaper):
    """`receipts` are those of requests under way and of the last `keep` that have ended."""

    def __init__(  # spelt out: compiled, `**options` would not reach the base class
        self,
        backends: Iterable[BackendSpec],
        buckets: Sequence[Bucket],
        *,
        route: Route = warm_or_least_work,
        affinity: Affinity | None = None,
        dispatch_ahead_s: float = DISPATCH_AHEAD_S,
        tenants: Iterable[Tenant] = (),
        default_weight: float = 1.0,
        itl_slo_s: float = inf,
        admit: Admit = refuse,
        keep: int = KEEP,
    ) -> None:
        """As a `Shaper` is made, and `keep`."""
        super().__init__(
            backends,
            buckets,
            route=route,
            affinity=affinity,
            dispatch_ahead_s=dispatch_ahead_s,
            tenants=tenants,
            default_weight=default_weight,
            itl_slo_s=itl_slo_s,
            admit=admit,
        )
        self.receipts = Receipts(keep)
        self.hindsight = Hindsight(self.receipts)
        self._noted = ""  # who came last, once it has a receipt

    def settle(self, now: float) -> None:
        """Judge the refusals that can be judged by now; decides nothing."""
        self.hindsight.passes(self._outlook, self.backends, self._dispatch_ahead_s, now)

    # What drivers call.

    def arrive(self, request: Request, now: float) -> list[Action]:
        self._noted = ""
        actions = super().arrive(request, now)
        if self._noted != request.id:  # refused before there was anything to predict
            for action in actions:
                if isinstance(action, Reject) and action.request is request:
                    self._turned_away(action, now)
        return actions

    def first_token(self, request_id: str, now: float) -> list[Action]:
        receipt = self.receipts.under_way.get(request_id)
        if receipt is not None and receipt.first_token_at < 0.0:
            self._answers(receipt, now)
        return super().first_token(request_id, now)

    def finish(self, request_id: str, now: float) -> list[Action]:
        receipt = self.receipts.under_way.get(request_id)
        if receipt is not None:
            if receipt.first_token_at < 0.0:
                outcome = "unanswered" if receipt.streams else "unseen"
                self.receipts.tally(receipt.bucket).admitted[outcome] += 1
            receipt.step(now, "ended", receipt.backend)
            self.receipts.close(receipt, "ended", now)
        return super().finish(request_id, now)

    def computed(
        self,
        request_id: str,
        now: float,
        cached_tokens: int | None = None,
        prompt_tokens: int = 0,
    ) -> list[Action]:
        receipt = self.receipts.under_way.get(request_id)
        if receipt is not None:
            receipt.step(now, "computed", receipt.backend)
            receipt.state = "queued"
            receipt.pieces += 1
        return super().computed(request_id, now, cached_tokens, prompt_tokens)

    def not_in_pieces(self, request_id: str, now: float) -> list[Action]:
        receipt = self.receipts.under_way.get(request_id)
        if receipt is not None:
            receipt.state = "queued"
            receipt.tries -= not receipt.pieces  # the next one is the first that counts
        return super().not_in_pieces(request_id, now)

    def used(
        self,
        request_id: str,
        output_tokens: int,
        now: float,
        cached_tokens: int | None = None,
        prompt_tokens: int = 0,
    ) -> None:
        receipt = self.receipts.under_way.get(request_id)
        if receipt is not None:
            receipt.output_tokens = output_tokens
            receipt.engine_tokens = prompt_tokens
            receipt.cached_tokens = -1 if cached_tokens is None else cached_tokens
        super().used(request_id, output_tokens, now, cached_tokens, prompt_tokens)

    def cancel(self, request_id: str, now: float) -> list[Action]:
        receipt = self.receipts.under_way.get(request_id)
        if receipt is not None:
            self.receipts.tally(receipt.bucket).admitted["unanswered"] += 1
            receipt.step(now, "left")
            self.receipts.close(receipt, "left", now)
        return super().cancel(request_id, now)

    def retry(self, request_id: str, now: float) -> list[Action]:
        receipt = self.receipts.under_way.get(request_id)
        if receipt is not None:
            receipt.step(now, "failed", receipt.backend)
            receipt.state = "queued"
            receipt.pieces = 0
        return super().retry(request_id, now)

    # What it notes on the way.

    def _decided(
        self,
        waiting: Waiting,
        options: Sequence[Option],
        option: Option,
        queued: int,
        reason: RejectReason | None,
        now: float,
    ) -> None:
        request, bucket = waiting.request, self.buckets[waiting.bucket]
        receipt = self._open(request, bucket.name, now)
        receipt.options = options
        receipt.chosen = option
        receipt.queued = queued
        receipt.max_wait_s = bucket.max_wait_s
        receipt.target_s = min(request.timeout_s, bucket.max_wait_s + option.prefill_s)
        if reason is None:
            receipt.rule = "starts" if queued < 0 else "queues"
            if not attainable(request, bucket, option):
                receipt.rule = "idle"
            if self.hindsight.watches:
                self.hindsight.took(request, bucket, options, queued)
            return
        receipt.rule = "tenant_share"
        if queued >= bucket.max_queue:
            receipt.rule = "line_full"
            receipt.value, receipt.limit = float(queued), float(bucket.max_queue)
        elif reason == "deadline_unattainable":
            wait_s = option.wait_s + option.margin_s
            receipt.rule, receipt.value, receipt.limit = "max_wait", wait_s, bucket.max_wait_s
            if wait_s <= bucket.max_wait_s:
                receipt.rule = "timeout"
                receipt.value, receipt.limit = wait_s + option.prefill_s, request.timeout_s
        self._refuse(receipt, now)
        if receipt.rule != "tenant_share":
            self.hindsight.refused(waiting, receipt, option, now)

    def _send(self, waiting: Waiting, backend: Backend, matched_tokens: int, now: float) -> Send:
        if self.hindsight.watches:
            self.hindsight.sends(waiting, backend, self._outlook, self.buckets, now)
        send = super()._send(waiting, backend, matched_tokens, now)
        receipt = self.receipts.under_way.get(waiting.request.id)
        if receipt is not None:
            receipt.waits_for("", now)
            receipt.step(now, "sent", backend.name)
            receipt.state = "prefilling"
            receipt.backend = backend.name
            if receipt.pieces:
                receipt.predicted_s += send.predicted_ttft_s
            else:
                receipt.sent_at = now
                receipt.tries += 1
                receipt.matched_tokens = matched_tokens
                receipt.predicted_s = send.predicted_ttft_s
        return send

    def _enqueue(self, waiting: Waiting, option: Option, now: float) -> None:
        super()._enqueue(waiting, option, now)
        receipt = self.receipts.under_way.get(waiting.request.id)
        if receipt is not None:
            backend, why = self.backends[option.backend], "turn"
            if waiting in heads_of([backend]):
                why = self._blocked_by(backend, waiting, now) or "turn"
            receipt.waits_for(why, now)
            receipt.step(now, "queued", backend.name, why)

    def _start_next(self, backend: Backend, now: float) -> list[Action]:
        actions = super()._start_next(backend, now)
        if backend.queued:
            for head in heads_of([backend]):
                receipt = self.receipts.under_way.get(head.request.id)
                if receipt is not None:
                    why = self._blocked_by(backend, head, now) or "turn"
                    if why != receipt.waiting_for:
                        receipt.waits_for(why, now)
        return actions

    def _blocked_by(self, backend: Backend, waiting: Waiting, now: float) -> Block:
        return blocked_by(self._outlook, backend, waiting, self.buckets[waiting.bucket], now)

    def _reject(
        self, waiting: Waiting, reason: RejectReason, now: float, wait_s: float = 0.0
    ) -> Reject:
        request = waiting.request
        receipt = self.receipts.under_way.get(request.id)
        if receipt is None:  # on arrival
            receipt = self._open(request, waiting.bucket, now)
            receipt.rule = "no_backend"
        else:
            receipt.rule = _late_rule(receipt, reason, now)
            self.receipts.tally(receipt.bucket).admitted["refused"] += 1
        self._refuse(receipt, now)
        return super()._reject(waiting, reason, now, wait_s)

    def _beyond(self, waiting: Waiting, now: float) -> Reject:
        reject = super()._beyond(waiting, now)
        receipt = self.receipts.under_way.get(waiting.request.id)
        if receipt is not None:
            self.receipts.tally(receipt.bucket).admitted["refused"] += 1
            self._beyond_all(receipt)
            self._refuse(receipt, now)
        return reject

    def _pass_time(self, now: float) -> None:
        if self.hindsight.watches:
            self.hindsight.passes(self._outlook, self.backends, self._dispatch_ahead_s, now)
        super()._pass_time(now)

    def _turned_away(self, reject: Reject, now: float) -> None:
        """Refused without a prediction: by length or quota."""
        receipt = self._open(reject.request, reject.bucket, now)
        if reject.reason == "tenant_quota":
            receipt.rule = "tenant_quota"
            receipt.value = reject.retry_after_s
            receipt.limit = 0.0
        else:
            self._beyond_all(receipt)
        self._refuse(receipt, now)

    def _beyond_all(self, receipt: Receipt) -> None:
        receipt.rule = "prompt_too_long"
        receipt.value = float(receipt.prompt_tokens)
        receipt.limit = float(max(bucket.up_to for bucket in self.buckets.values()))

    def _open(self, request: Request, bucket: str, now: float) -> Receipt:
        self._noted = request.id
        return self.receipts.open(request, bucket, now)

    def _refuse(self, receipt: Receipt, now: float) -> None:
        receipt.step(now, "refused", "", receipt.rule)
        self.receipts.close(receipt, "refused", now)

    def _answers(self, receipt: Receipt, now: float) -> None:
        """Its first token is here."""
        receipt.first_token_at = now
        receipt.state = "streaming"
        receipt.step(now, "first_token", receipt.backend)
        tally, ttft_s = self.receipts.tally(receipt.bucket), now - receipt.arrived_at
        tally.admitted["met" if ttft_s <= receipt.target_s else "missed"] += 1
        if receipt.chosen is not None and receipt.tries == 1:
            tally.first_token(ttft_s, receipt.chosen.ttft_s)


def _late_rule(receipt: Receipt, reason: RejectReason, now: float) -> str:
    """Why one who was taken is refused after all."""
    if reason == "no_backend_available":
        return "no_backend"
    if receipt.tries:
        return "no_time" if reason == "deadline_unattainable" else "line_full"
    if reason == "queue_full" and receipt.arrived_at == now:
        return "line_full"  # it could have started, but stands behind its own tenant's
    return "gave_way" if reason == "queue_full" else "deadline_passed"
