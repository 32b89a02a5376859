"""Records of decisions: the forecast, the decision, and what happened then.

They store lengths, seconds and names, no text. A bounded number of ended records is kept.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

from forebay.proxy.core.model import HISTORY, Request
from forebay.proxy.core.policy.routing import Option

ERROR_S: Final[tuple[float, ...]] = (0.05, 0.2, 1.0, 4.0, 15.0)
"""Bounds of `DecisionTally.late` and `early`."""
OUTCOMES: Final = ("met", "missed", "refused", "unanswered", "not_streamed")
VERDICTS: Final = ("right", "costs_another", "false", "unjudged")


class Step:
    """One event of a request.

    Attributes:
        kind: queued, sent, failed, first_token, ended, left or refused.
        why: the reason to wait of a "queued" request, a `Block` or "turn".
    """

    __slots__ = ("at", "backend", "kind", "why")

    def __init__(self, at: float, kind: str, backend: str, why: str) -> None:
        self.at = at
        self.kind = kind
        self.backend = backend
        self.why = why


class Receipt:
    """The record of one request. Times are on the caller's clock, -1 if it did not happen.

    Attributes:
        options: the forecast for each backend on arrival.
        chosen: the option that the route picked on arrival.
        rule: the condition that decided, by `value` against `limit` (see `recorder.py`).
        queued: requests of its bucket that waited already; -1 if it did not have to wait.
        target_s: the first token was promised within this time after arrival.
        waits: seconds in the queue by what kept it there.
        state: queued, prefilling, streaming, ended, left or refused.
        predicted_s: predicted seconds from the last dispatch to the first token.
        engine_tokens: its prompt as the engine counts.
        would: the record that mode shape would have written, where requests are only observed.
        status, reason, model: the answer that the client got, and the model that it named,
            reported by the relay.
    """

    __slots__ = (
        "arrived_at",
        "backend",
        "bucket",
        "cached_tokens",
        "chosen",
        "ended_at",
        "engine_tokens",
        "first_token_at",
        "hindsight",
        "id",
        "limit",
        "matched_tokens",
        "max_wait_s",
        "model",
        "options",
        "output_tokens",
        "predicted_s",
        "prompt_tokens",
        "queued",
        "reason",
        "rule",
        "sent_at",
        "service_class",
        "state",
        "status",
        "steps",
        "streams",
        "target_s",
        "tenant",
        "timeout_s",
        "tries",
        "value",
        "wait_since",
        "waiting_for",
        "waits",
        "would",
    )

    def __init__(self, request: Request, bucket: str, now: float) -> None:
        # The request as it arrived.
        self.id = request.id
        self.tenant = request.tenant
        self.service_class: str = request.service_class
        self.prompt_tokens = request.prompt_tokens
        self.streams = request.streams
        self.timeout_s = request.timeout_s
        self.bucket = bucket
        self.arrived_at = now
        # The decision on arrival: limits, options, and the rule that rejected it.
        self.max_wait_s = inf
        self.target_s = inf
        self.options: Sequence[Option] = ()
        self.chosen: Option | None = None
        self.queued = -1
        self.rule = ""
        self.value = 0.0
        self.limit = inf
        # Its way through the queue to a backend.
        self.steps: list[Step] = []
        self.waits: dict[str, float] = {}
        self.waiting_for = ""
        self.wait_since = now
        self.state = "queued"
        self.backend = ""
        self.tries = 0
        self.sent_at = -1.0
        self.matched_tokens = 0
        self.predicted_s = 0.0
        # How it ended, next to the prediction.
        self.first_token_at = -1.0
        self.ended_at = -1.0
        self.cached_tokens = -1
        self.engine_tokens = 0
        self.output_tokens = 0
        self.hindsight = ""
        self.status = 0
        self.reason = ""
        self.model = ""
        self.would: Receipt | None = None

    def step(self, at: float, kind: str, backend: str = "", why: str = "") -> None:
        if len(self.steps) < HISTORY:
            self.steps.append(Step(at, kind, backend, why))

    def waits_for(self, why: str, now: float) -> None:
        """Note the reason for which it waits from now on, or "" if it waits no longer."""
        before = self.waiting_for
        if before:
            self.waits[before] = self.waits.get(before, 0.0) + now - self.wait_since
        self.waiting_for = why
        self.wait_since = now


class DecisionTally:
    """Sums for one bucket.

    Attributes:
        admitted: admitted requests by outcome: first token within the target (met) or later
            (missed), rejected after all (refused), ended without a first token because the client
            left or the backend failed (unanswered), not visible without streaming (not_streamed).
        refusals: rejections for lack of time or room, by the verdict of `hindsight.py`.
        late, early: first tokens by the error of the prediction on arrival: the number up to each
            of ERROR_S, and above.
        late_s, early_s: sums of these errors.
        waits: seconds in the queue of ended requests, by the reason of the wait.
        observed: requests that were only observed, by the rule that would have decided.
    """

    __slots__ = ("admitted", "early", "early_s", "late", "late_s", "observed", "refusals", "waits")

    def __init__(self) -> None:
        self.admitted = dict.fromkeys(OUTCOMES, 0)
        self.refusals = dict.fromkeys(VERDICTS, 0)
        self.late = [0] * (len(ERROR_S) + 1)
        self.early = [0] * (len(ERROR_S) + 1)
        self.late_s = 0.0
        self.early_s = 0.0
        self.waits: dict[str, float] = {}
        self.observed: dict[str, int] = {}

    def first_token(self, ttft_s: float, predicted_s: float) -> None:
        """Count a first token by the error of its prediction. Both times are from arrival."""
        error_s = ttft_s - predicted_s
        at, size_s = 0, abs(error_s)
        while at < len(ERROR_S) and size_s > ERROR_S[at]:
            at += 1
        if error_s >= 0.0:
            self.late[at] += 1
            self.late_s += size_s
        else:
            self.early[at] += 1
            self.early_s += size_s


class Receipts:
    """The records of requests in progress, and of the last `keep` requests that have ended."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.under_way: dict[str, Receipt] = {}
        self.ended: dict[str, Receipt] = {}
        self.tallies: dict[str, DecisionTally] = {}

    def open(self, request: Request, bucket: str, now: float) -> Receipt:
        receipt = self.under_way[request.id] = Receipt(request, bucket, now)
        return receipt

    def close(self, receipt: Receipt, state: str, now: float) -> None:
        """End a record. Drops the oldest ended record if there are more than `keep`."""
        receipt.waits_for("", now)
        receipt.state = state
        receipt.ended_at = now
        if receipt.waits:
            waits = self.tally(receipt.bucket).waits
            for why, seconds in receipt.waits.items():
                waits[why] = waits.get(why, 0.0) + seconds
        self.under_way.pop(receipt.id, None)
        self.ended[receipt.id] = receipt
        if len(self.ended) > self.keep:
            del self.ended[next(iter(self.ended))]

    def tally(self, bucket: str) -> DecisionTally:
        tally = self.tallies.get(bucket)
        if tally is None:
            tally = self.tallies[bucket] = DecisionTally()
        return tally

    def find(self, request_id: str) -> Receipt | None:
        """Return a record, or None if it is unknown or was dropped."""
        return self.under_way.get(request_id) or self.ended.get(request_id)

    def named(self, name: str) -> list[Receipt]:
        """Return the records named `name`, or `name/` and a number, the latest first."""
        if (receipt := self.find(name)) is not None:
            return [receipt]
        matches = [r for r in self.ended.values() if r.id.rpartition("/")[0] == name]
        matches += [r for r in self.under_way.values() if r.id.rpartition("/")[0] == name]
        return sorted(reversed(matches), key=lambda match: -match.arrived_at)

    def answered(self, request_id: str, status: int, reason: str, model: str) -> None:
        """Note the answer that the client got, and the model that it named."""
        receipt = self.find(request_id)
        if receipt is not None:
            receipt.status = status
            receipt.reason = reason
            receipt.model = model
