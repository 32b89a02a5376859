"""Measure the seconds of prefills on one engine, and teach the cost model and the server model."""

from math import inf
from typing import Final

from forebay.proxy.core.learn.api_server import ServerModel, TimeInServer
from forebay.proxy.core.learn.cost import MOST_OFF, CostModel, Vector, features
from forebay.proxy.core.model import ENOUGH, INSTANT_S, SLACK
from forebay.proxy.core.state.elsewhere import SILENT_S, Elsewhere
from forebay.proxy.core.state.in_flight import InFlight
from forebay.proxy.core.state.prefill_queue import PrefillQueue

LEARN_FROM: Final = 4.0
"""Elapsed time is attributed to prefills that have ended. The progress of unfinished prefills is
unknown, so ended work must be this many times the unfinished work. Doubled: learns less
often in chunking engines."""


class PrefillObserver:
    """Measures the seconds of prefills on one engine and teaches the cost model.

    An observation begins when the engine begins to prefill and ends with its answer. Prefills of
    one step answer together and are measured together, with the work that other proxies had there.
    So an observation lasts until all answers of its step have come. The API server's time is no
    work of the engine: it is subtracted, or learned if it is most of the time, as with the hit of a
    long prompt.

    Attributes:
        work: cost terms of all prefills done while there were other proxies, for them to learn.
    """

    def __init__(self, cost: CostModel, server: ServerModel) -> None:
        self.work: Vector = (0.0, 0.0, 0.0)
        self._cost = cost
        self._server = server
        self._times = TimeInServer(server)
        self._terms: Vector = (0.0, 0.0, 0.0)
        self._since = 0.0
        self._others_before: Vector = (0.0, 0.0, 0.0)  # their work done when the observation began
        self._impure: list[tuple[float, Vector, float]] = []  # since the last pure prefill
        self._answered_at = inf  # the last answer of a step of which more answers may come

    def begin(self, now: float, elsewhere: Elsewhere | None) -> None:
        """Start an observation. The last observation is dropped if it has no answer."""
        if self._answered_at < inf:
            self._end_step()
        self._terms = (0.0, 0.0, 0.0)
        self._times.begin()
        self._since = now
        if elsewhere is not None:
            self._others_before = elsewhere.work

    def lose_track(self) -> None:
        """Drop the observation until a first token is seen or the engine is empty.

        A prefill whose first token cannot be seen is over by its prediction only, so the start of
        the next prefill is unknown.
        """
        if self._answered_at < inf:
            self._end_step()
        self._since = inf

    def _end_step(self) -> None:
        """Learn from a step that has had an answer and gets no more."""
        self._learn(self._terms, self._answered_at - self._since)
        self._answered_at = inf

    def answered(self, prefill: InFlight, queue: PrefillQueue, now: float) -> None:
        """Learn from a prefill that is over and has left the queue."""
        elsewhere = queue.elsewhere
        if now - self._answered_at > SLACK * INSTANT_S:
            # This answer is of the next step, which the engine began right after the last step.
            self.begin(self._answered_at - self._times.after_s, elsewhere)
        # Add its work to the observation, and to the report for other proxies.
        prompt_tokens = prefill.request.prompt_tokens
        sent_at, reached_at, last = prefill.sent_at, prefill.reached_at, not queue.prefills
        self._times.answered(prompt_tokens, sent_at, reached_at, self._since, last=last)
        fixed, linear, pairs = features(prefill.uncached_tokens, prompt_tokens)
        a, b, c = self._terms
        self._terms = a + fixed, b + linear, c + pairs
        if elsewhere is not None:
            a, b, c = self.work
            self.work = a + fixed, b + linear, c + pairs
        if self._since == inf:
            if prefill.request.streams:
                self.begin(now, elsewhere)
            return
        # Learn once the measured time belongs to prefills that have ended.
        elapsed_s = now - self._since
        if elsewhere is not None and self._others_worked(elsewhere):
            if not queue.prefills or elapsed_s >= SILENT_S:
                self._learn_shared(elsewhere, elapsed_s)
                self.begin(now, elsewhere)
        elif not queue.prefills or (elapsed_s >= INSTANT_S and self._mostly_ended(queue)):
            if elapsed_s > 0:
                self._answered_at = now
            if not queue.prefills or elsewhere is not None:  # their later work is not part of it
                self.begin(now, elsewhere)

    def answered_impurely(self, prefill: InFlight, now: float) -> None:
        """Note a first token before which more than its prefill may have happened.

        The engine's speed is learned from such answers only where there are no other answers: from
        the median of ENOUGH ratios of the time to first token to its prediction.
        """
        self.lose_track()
        prompt_tokens = prefill.request.prompt_tokens
        begins_at = prefill.ends_at - prefill.prefill_s
        # The engine either waited for the text, or the text waited in the engine.
        waited = begins_at - prefill.reached_at < SLACK * INSTANT_S
        before_s = prefill.reached_at - prefill.sent_at if waited else 0.0
        server_s = before_s + self._server.after_s(prompt_tokens)
        predicted_s = prefill.ends_at - prefill.sent_at - before_s
        if not server_s <= predicted_s < inf or predicted_s == 0.0 or now <= prefill.sent_at:
            return
        elapsed_s = max(now - prefill.sent_at - server_s, predicted_s / MOST_OFF)
        fixed, linear, pairs = features(prefill.uncached_tokens, prompt_tokens)
        share = predicted_s / prefill.prefill_s  # the work ahead of it is of the same kind
        terms = share * fixed, share * linear, share * pairs
        self._impure.append((elapsed_s / predicted_s, terms, elapsed_s))
        if len(self._impure) == ENOUGH:
            _, terms, elapsed_s = sorted(self._impure)[ENOUGH // 2]
            self._impure.clear()
            self._cost.observe(terms, elapsed_s)

    def _learn(self, terms: Vector, elapsed_s: float) -> None:
        self._impure.clear()
        engine_s = self._cost.total_s(terms)
        server_s = self._times.before_s + self._times.after_s
        if server_s > engine_s:
            self._times.learn(elapsed_s, engine_s)
        else:
            self._cost.observe(terms, max(elapsed_s - server_s, engine_s / MOST_OFF))

    def _mostly_ended(self, queue: PrefillQueue) -> bool:
        """True if most of the elapsed time went to prefills that have ended."""
        return not queue.chunked or self._cost.total_s(self._terms) >= LEARN_FROM * queue.total_s

    def _others_worked(self, elsewhere: Elsewhere) -> bool:
        """True if the engine also computed other proxies' prefills since the start."""
        return elsewhere.work != self._others_before or elsewhere.done_at() > self._since

    def _learn_shared(self, elsewhere: Elsewhere, elapsed_s: float) -> None:
        """Learn from other proxies' prefills and ours together, unless the time is too short."""
        if elapsed_s < SILENT_S:
            return
        (a, b, c), (d, e, f), (x, y, z) = self._terms, elsewhere.work, self._others_before
        self._learn((a + d - x, b + e - y, c + f - z), elapsed_s)
