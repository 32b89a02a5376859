"""Mode observe: requests are sent at once, and a forecast shows the decisions of mode shape.

The forecast is a second shaper in front of modelled engines, in virtual time. It gets the same
arrivals, fills queues of its own and is played up to the present at each event of the traffic. Real
answers teach it the speed of prefills, the seconds from first token to finish, and the lengths of
answers. Engines that the traffic overloads teach it too long answers: then it rejects some percent
more or fewer requests than mode shape would (tests/bench/observe.py).
"""

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from math import inf

from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.learn.cost import FULL_STEP_TOKENS
from forebay.proxy.core.model import HISTORY, Action, Request, Send
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.core.state.in_flight import InFlight


class ModelledPrefill:
    """A prefill in a modelled engine.

    Attributes:
        left: tokens that are not computed yet.
        step: tokens that are computed in the current step.
    """

    __slots__ = ("left", "sent", "step")

    def __init__(self, sent: InFlight) -> None:
        self.sent = sent
        self.left = max(1.0, float(sent.uncached_tokens))
        self.step = 0.0


def _turn(prefill: ModelledPrefill) -> tuple[bool, int]:
    """Return the order of prefills in a step: begun prefills first, then by priority."""
    return prefill.left >= prefill.sent.uncached_tokens, prefill.sent.priority


class ModelledEngine:
    """Computes prefills as vLLM does: in steps of bounded tokens, first come first served.

    Attributes:
        ends_at: when its current step ends; infinite without prefills.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.ends_at = inf
        self._prefills: dict[str, ModelledPrefill] = {}

    def add(self, sent: InFlight, now: float) -> None:
        """Add the prefill of a request that is sent now."""
        self._prefills[sent.request.id] = ModelledPrefill(sent)
        if self.ends_at == inf:
            self._begin(now)

    def drop(self, request_id: str) -> None:
        """Forget a prefill. Its part of the current step still takes its time."""
        self._prefills.pop(request_id, None)

    def end_step(self) -> list[InFlight]:
        """End the current step and begin the next. Returns the prefills that are done."""
        done = []
        for request_id, prefill in list(self._prefills.items()):
            prefill.left -= prefill.step
            prefill.step = 0.0
            if prefill.left <= 0.0:
                done.append(prefill.sent)
                del self._prefills[request_id]
        self._begin(self.ends_at)
        return done

    def _begin(self, now: float) -> None:
        room, seconds = float(FULL_STEP_TOKENS), 0.0
        cost, chunk = self.backend.cost, self.backend.spec.chunk_tokens
        ready = [p for p in self._prefills.values() if p.sent.reached_at <= now]
        if not ready:  # the API server tokenizes the next prompts
            self.ends_at = min((p.sent.reached_at for p in self._prefills.values()), default=inf)
            return
        for prefill in sorted(ready, key=_turn):
            prefill.step = min(prefill.left, chunk, room)
            room -= prefill.step
            tokens = max(1, prefill.sent.uncached_tokens)
            whole_s = cost.predict_s(tokens, prefill.sent.request.prompt_tokens)
            seconds += whole_s * prefill.step / tokens
        self.ends_at = now + seconds


class Shadow:
    """A shaper in front of modelled engines.

    Args:
        shaper: decides what mode shape would do.
        traffic: the real backends, from whose answers all speeds are learned.
        recorder: keeps the records of the traffic.
    """

    def __init__(
        self, shaper: Shaper, traffic: Mapping[str, Backend], recorder: DecisionRecorder
    ) -> None:
        self.shaper = shaper
        self._traffic = traffic
        self._recorder = recorder
        self._engines = {name: ModelledEngine(b) for name, b in shaper.backends.items()}
        self._finishes: list[tuple[float, str, str]] = []
        self._undecided: dict[str, str] = {}  # buckets of the requests that wait
        self._now = 0.0

    def arrive(self, request: Request, bucket: str, now: float) -> None:
        """Let a request arrive that was sent at once in the traffic."""
        self.play(now)
        self._undecided[request.id] = bucket
        actions = self.shaper.arrive(request, now)
        would = self.shaper.recorder.receipts.find(request.id)
        assert would is not None
        self._recorder.foreseen(request.id, would)
        self._carry_out(actions, now)

    def left(self, request_id: str, now: float) -> None:
        """Note that a client has left before its first token."""
        self.play(now)
        if self.shaper.waits(request_id):
            self._undecided.pop(request_id, None)
            self._carry_out(self.shaper.cancel(request_id, now), now)
            return
        for name, backend in self.shaper.backends.items():
            if request_id in backend.prefills:
                self._engines[name].drop(request_id)
                self._carry_out(self.shaper.finish(request_id, now), now)
                return

    def backend_down(self, name: str, now: float, keeps_cache: bool) -> None:
        """Let a backend take no work. Prefills in a backend that has failed go elsewhere."""
        self.play(now)
        self._carry_out(self.shaper.backend_down(name, now, keeps_cache), now)
        if not keeps_cache:
            for request_id in list(self.shaper.backends[name].prefills):
                self._engines[name].drop(request_id)
                self._carry_out(self.shaper.retry(request_id, now), now)

    def backend_up(
        self, name: str, now: float, kv_tokens: float | None, most_prefills: float
    ) -> None:
        """Let a backend take work."""
        self.play(now)
        self._carry_out(self.shaper.backend_up(name, now, kv_tokens, most_prefills), now)

    def play(self, until: float) -> None:
        """Play all that happens before `until`."""
        finishes = self._finishes
        while True:
            engine, now = None, finishes[0][0] if finishes else inf
            for other in self._engines.values():
                if other.ends_at < now:
                    engine, now = other, other.ends_at
            wake_at = max(self._now, self.shaper.wake_at())
            if min(now, wake_at) >= until:
                self._now = until
                return
            self._now = min(now, wake_at)
            if wake_at < now:
                self._carry_out(self.shaper.wake(wake_at), wake_at)
            elif engine is not None:
                self._first_tokens(engine, now)
            else:
                _, request_id, name = heappop(finishes)
                self._finish(request_id, name, now)

    def _first_tokens(self, engine: ModelledEngine, now: float) -> None:
        backend = engine.backend
        decode_s = self._traffic[backend.name].decode_s
        for sent in engine.end_step():
            request = sent.request
            if request.streams:
                self._carry_out(self.shaper.first_token(request.id, now), now)
            at = now + decode_s[sent.bucket].value
            heappush(self._finishes, (at, request.id, backend.name))

    def _finish(self, request_id: str, name: str, now: float) -> None:
        """End an answer. Its usage equals the expectation, as the model knows nothing else."""
        sent = self.shaper.backends[name].in_flight[request_id]
        prompt_tokens = sent.request.prompt_tokens
        matched_tokens = prompt_tokens - sent.uncached_tokens
        self.shaper.used(request_id, 0, now, matched_tokens, prompt_tokens)
        self._carry_out(self.shaper.finish(request_id, now), now)

    def _carry_out(self, actions: Iterable[Action], now: float) -> None:
        for action in actions:
            request_id = action.request.id
            bucket = self._undecided.pop(request_id, None)
            would = self.shaper.recorder.receipts.find(request_id)
            if bucket is not None and would is not None:
                self._recorder.foreseen_end(bucket, would)
            if isinstance(action, Send):
                backend = self.shaper.backends[action.backend]
                self._engines[action.backend].add(backend.in_flight[request_id], now)


class ObservingShaper(Shaper):
    """A shaper that forecasts its own decisions while it only observes.

    A change of rules or backends begins a new forecast, with empty queues. While there are other
    proxies there is no forecast, because it would miss their requests.
    """

    _shadow: Shadow | None = None
    _changes = -1  # of the state, when the forecast began

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Send, queue (no action) or reject a new request."""
        actions, shadow = super().arrive(request, now), self._current(now)
        if shadow is not None:
            shadow.arrive(request, self._state.nearest_bucket(request).name, now)
        return actions

    def finish(self, request_id: str, now: float) -> list[Action]:
        """Free a slot: the request completed, failed, or its client left."""
        if (shadow := self._current(now)) is not None:
            sent = self._state.running[request_id][0].in_flight[request_id]
            answered = sent.first_token_at is not None or sent.output_tokens
            if sent.request.streams and not answered:
                shadow.left(request_id, now)
        return super().finish(request_id, now)

    def backend_up(
        self,
        name: str,
        now: float,
        kv_tokens: float | None = None,
        most_prefills: float = inf,
    ) -> list[Action]:
        """Let a backend take work. Arguments as of Shaper."""
        shadow = self._current(now)
        if shadow is not None and name in shadow.shaper.backends:
            shadow.backend_up(name, now, kv_tokens, most_prefills)
        return super().backend_up(name, now, kv_tokens, most_prefills)

    def backend_down(self, name: str, now: float, keeps_cache: bool = False) -> list[Action]:
        """Let a backend take no work. Arguments as of Shaper."""
        shadow = self._current(now)
        if shadow is not None and name in shadow.shaper.backends:
            shadow.backend_down(name, now, keeps_cache)
        return super().backend_down(name, now, keeps_cache)

    def settle(self, now: float) -> None:
        """Bring the forecast and the judgement of rejections up to date."""
        if (shadow := self._current(now)) is not None:
            shadow.play(now)
        super().settle(now)

    def _current(self, now: float) -> Shadow | None:
        """Return the forecast under the present rules, or None."""
        state = self._state
        if state.observed is None or state.sharing:
            if self._shadow is not None:
                self._shadow, self.preview = None, self._arrivals.preview
            return None
        if self._shadow is None or self._changes != state.changes:
            shaper = self._twin(now)
            self._shadow = Shadow(shaper, self.backends, self.recorder)
            self._changes = state.changes
            self.preview = shaper.preview
        return self._shadow

    def _twin(self, now: float) -> Shaper:
        """Return a shaper with the same rules and backends, which learns from this shaper."""
        state, fairness = self._state, self._state.fairness
        shaper = Shaper(
            [backend.spec for backend in self.backends.values() if not backend.draining],
            list(self.buckets.values()),
            route=state.route,
            affinity=state.affinity,
            dispatch_ahead_s=state.dispatch_ahead_s,
            tenants=fairness.tenants,
            default_weight=fairness.default_weight,
            recorder=DecisionRecorder(max(HISTORY, self.recorder.receipts.keep)),
        )
        shaper._state.output_lengths = state.output_lengths
        for name, twin in shaper.backends.items():
            backend = self.backends[name]
            twin.cost = backend.cost  # its own observer still teaches the model that this replaces
            twin.api_server.model = backend.api_server.model
            if backend.models is not None or backend.strict:
                shaper.changes.set_models(name, backend.models, now, strict=backend.strict)
            if backend.up:
                shaper.backend_up(name, now, backend.kv_tokens, backend.most_prefills)
        return shaper
