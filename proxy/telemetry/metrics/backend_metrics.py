"""Metrics that are read at each scrape: states of backends, and why requests wait.

Labels are names of backends and buckets, and fixed lists.
"""

from collections.abc import Iterable
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from forebay.proxy.core.explain.receipt import Receipts
from forebay.proxy.core.health import Health, State
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend

LONG_PROMPT = 100_000  # tokens
WAIT_REASONS = {  # of core/policy/start.py, and "turn"
    "turn": "behind_others",
    "down": "backend_down",
    "slots": "max_concurrency",
    "trial": "half_open",
    "tokenizer": "tokenizing",
    "line": "busy",
    "kv": "kv_full",
    "leader": "shared_prefix",
    "prefill_limit": "prefills_per_backend",
    "partition": "reserved_for_chats",
}


class BackendMetrics:
    """A collector of the states of backends and of waiting requests."""

    def __init__(self, shaper: Shaper, health: Health, receipts: Receipts) -> None:
        self._shaper = shaper
        self._health = health
        self._receipts = receipts

    def collect(self) -> Iterable[Metric]:
        yield from self._states()
        yield from self._waiting()

    def _states(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "forebay_backend_state",
            "1 for the state that the backend is in",
            labels=["backend", "state"],
        )
        transitions = CounterMetricFamily(
            "forebay_backend_transitions",
            "Times that the backend has entered a state, by reason",
            labels=["backend", "state", "reason"],
        )
        prefill = GaugeMetricFamily(
            "forebay_backend_long_prefill_seconds",
            "Predicted prefill of 100,000 tokens, none cached, as learned from responses",
            labels=["backend"],
        )
        for name, backend in self._shaper.backends.items():
            cost_s = backend.cost.predict_s(LONG_PROMPT, LONG_PROMPT)
            prefill.add_metric([name], cost_s)
            if name not in self._health:  # it leaves: only its running requests are left
                continue
            for label in get_args(State):
                state.add_metric([name, label], float(label == self._health.state(name)))
            for (entered, reason), count in self._health.counts(name).items():
                transitions.add_metric([name, entered, reason], count)
        yield from (state, transitions, prefill)

    def _waiting(self) -> Iterable[Metric]:
        waiting = GaugeMetricFamily(
            "forebay_waiting_requests",
            "Waiting requests, by what keeps them in the queue",
            labels=["backend", "bucket", "reason"],
        )
        for name, backend in self._shaper.backends.items():
            for bucket, reason, count in self._reasons(backend):
                waiting.add_metric([name, bucket, reason], count)
        waited = CounterMetricFamily(
            "forebay_wait_seconds",
            "Time in the queue by what kept requests there, of those that have ended",
            labels=["bucket", "reason"],
        )
        for bucket in self._shaper.buckets:
            for why, seconds in self._receipts.tally(bucket).waits.items():
                if seconds:
                    waited.add_metric([bucket, WAIT_REASONS[why]], seconds)
        yield from (waiting, waited)

    def _reasons(self, backend: Backend) -> Iterable[tuple[str, str, int]]:
        """Count the requests that wait for a backend, by bucket and reason.

        The next request of each class and tenant waits for something of the backend, and all
        others wait for that one.
        """
        for bucket, queue in backend.queues.items():
            counts = dict.fromkeys(WAIT_REASONS, 0)
            heads = queue.heads()
            for head in heads:
                receipt = self._receipts.under_way.get(head.request.id)
                counts[receipt.waiting_for if receipt and receipt.waiting_for else "turn"] += 1
            counts["turn"] += len(queue) - len(heads)
            for why, count in counts.items():
                if count:
                    yield bucket, WAIT_REASONS[why], count
