"""Decide which backends take new work, from the results of probes and requests.

A backend is `up`, or it takes no work for one of three reasons:
 - `down`: it refuses connections (3 requests in a row), or its /health failed (2 probes in a row).
   A good probe brings it back: within 2 s, and at once if no other backend is up.
 - `asleep`: /health is good, but vLLM sleeps. It is up with the first probe after it wakes.
 - `ejected`: it answers, but badly. 3 requests in a row failed before the first byte, or its first
   tokens are more than 3 times as late against prediction as its peers' (a gray failure).
   /health does not show that, so after a while it is `half_open`: one request at a time,
   until one succeeds (`up`) or fails (`ejected` again).

A backend that leaves `up` less than LONGEST_HOLD_S after it came stays away twice as long, which
damps flapping.
A backend that answers "full" (429, 503) is sent nothing for a moment and keeps its state.
A backend that an operator drains keeps its state, and no other is compared with it.

Panic: when no backend of a model is up, all of them that are `ejected` or `half_open` are used
without limit. Bad answers are better than none, and a rule that ejects the last backend turns a
slow hour into an outage.

Health reads no clock: `now` comes in, and `intakes()` returns what changed. Every tie has a
defined order, and every iteration has the order of the configuration.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from math import inf
from typing import Final, Literal, NamedTuple

from forebay.proxy.core.learn.cost import FAR_OFF
from forebay.proxy.core.learn.decay import RECENT_S
from forebay.proxy.core.model import HISTORY, INSTANT_S, UpModels

NOTHING: Final[frozenset[str]] = frozenset()
State = Literal["up", "down", "asleep", "ejected", "half_open"]
SILENT: Final[frozenset[State]] = frozenset({"down", "asleep"})
"""States of backends that answer no request."""
Reason = Literal[
    "starting",  # no probe has passed yet
    "probe_passed",  # from down or asleep to up
    "asleep",
    "served",  # its trial, or a request in a panic, was answered well
    "connections_refused",  # FAILURES requests in a row
    "probes_failed",  # FAILED_PROBES in a row
    "failures",  # FAILURES requests in a row failed before the first byte
    "late",  # first tokens are late against prediction
    "trial_failed",
    "trial_late",
    "trial",  # the time after an ejection is over
]
"""Causes of a transition: labels of metrics, and fields of the log."""

FAILURES = 3  # in a row, by requests; doubled: three more clients see a dead backend
FAILED_PROBES = 2  # in a row; doubled: a backend that hangs is found two probes later
# First and longest time out of rotation. Both doubled: a healthy backend is missed for longer.
HOLD_S, LONGEST_HOLD_S = 0.5, 30.0
LONGEST_DOWN_S = 2.0  # after `down`, whose good probe counts; doubled: it is back 2 s later
GRAY_LEAST = 5  # first tokens in the window; doubled: a backend with few requests is never gray
# The same for a full backend that gets no work. Both doubled: it may run empty meanwhile.
FULL_S, LONGEST_FULL_S = 0.25, 5.0

ANY, NONE = inf, -inf
"""Prefills that a backend may be sent at once: 1 during a trial, 0 while it is full (its queue
stays), NONE while it is down."""


class Transition(NamedTuple):
    """A change of a backend's state. `why` is the reason in words, with figures."""

    backend: str
    state: State
    reason: Reason
    why: str


class Intake(NamedTuple):
    """The work that a backend may be sent from now on.

    Attributes:
        most_prefills: ANY, 1, 0 or NONE.
        restarted: its prefix cache is probably gone.
        only: requests that name one of these models; None: all that it serves.
    """

    backend: str
    most_prefills: float
    restarted: bool
    only: frozenset[str] | None = None


class _Backend:
    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.state: State = "down"
        self.reason: Reason = "starting"
        self.why = "no answer yet"
        self.transitions: Counter[tuple[State, Reason]] = Counter()
        self.restarted = True
        self.intake = Intake(name, NONE, restarted=True)  # as last returned
        self.since = now  # in this state
        self.drained = False
        self.held_until = -inf
        self.ejections = 0
        self.failures = 0  # in a row
        self.refusals = 0
        self.failed_probes = 0
        self.full_until = -inf
        self.fulls = 0  # in a row
        self.waiting: dict[str, tuple[float, float]] = {}  # sent at, predicted to take
        self.ratios: deque[tuple[float, float]] = deque(maxlen=HISTORY)
        self.models: frozenset[str] | None = None  # that it serves; None: unknown

    @property
    def available(self) -> bool:
        return self.state == "up" and not self.drained

    def shares_models(self, other: "_Backend") -> bool:
        """True if the two backends may serve a model in common."""
        if self.models is None or other.models is None:
            return True
        return not self.models.isdisjoint(other.models)

    def enter(self, state: State, reason: Reason, why: str, now: float) -> None:
        if state in ("down", "ejected"):
            self._hold(state, now)
        self.restarted = state in SILENT or (self.restarted and state in ("up", "half_open"))
        self.state, self.reason, self.why, self.since = state, reason, why, now
        self.transitions[state, reason] += 1
        self.failures = self.refusals = self.failed_probes = 0
        self.ratios.clear()

    def _hold(self, state: State, now: float) -> None:
        """Stay out of rotation for a while in this state, longer after earlier ejections."""
        if self.state == "up" and now - self.since > LONGEST_HOLD_S:
            self.ejections = 0
        hold_s, longest_s = HOLD_S, LONGEST_DOWN_S if state == "down" else LONGEST_HOLD_S
        for _ in range(self.ejections):  # doubled for each earlier ejection
            hold_s = min(longest_s, 2 * hold_s)
        self.held_until = now + hold_s
        self.ejections = min(self.ejections + 1, 16)

    def lately(self, now: float) -> list[float]:
        """Return observed over predicted times to first token, running requests included."""
        while self.ratios and self.ratios[0][0] < now - RECENT_S:
            self.ratios.popleft()
        late = [
            _ratio(now - sent_at, predicted_s)
            for sent_at, predicted_s in self.waiting.values()
            if now - sent_at > predicted_s and sent_at >= self.since
        ]
        return [ratio for _, ratio in self.ratios] + late


def median(values: list[float]) -> float:
    """Return the middle value, or the mean of the two middle values. `values` is not empty."""
    ordered, last = sorted(values), len(values) - 1
    return (ordered[last // 2] + ordered[(last + 1) // 2]) / 2


def _ratio(observed_s: float, predicted_s: float) -> float:
    return (observed_s + INSTANT_S) / (predicted_s + INSTANT_S)  # a 2 ms prefill may take 10 ms


class Health:
    """The health of all backends."""

    def __init__(self, names: Iterable[str], now: float = 0.0) -> None:
        self._backends = {name: _Backend(name, now) for name in names}
        self.moved = False  # an event came that `intakes` has not looked at
        self._unseen: list[Transition] = []

    def __repr__(self) -> str:
        return f"<Health {' '.join(f'{b.name}={b.state}' for b in self._backends.values())}>"

    def __contains__(self, name: str) -> bool:
        return name in self._backends

    def add(self, name: str, now: float) -> None:
        """Add a backend. It is down until a probe succeeds."""
        self.moved = True
        self._backends[name] = _Backend(name, now)

    def remove(self, name: str) -> None:
        """Remove a backend. Later events about it are ignored."""
        self.moved = True  # it may have been the last backend up
        self._backends.pop(name, None)

    def set_models(self, name: str, models: frozenset[str] | None) -> None:
        """Note the models of a backend. Only backends that share a model replace each other."""
        if (backend := self._backends.get(name)) and models != backend.models:
            backend.models, self.moved = models, True

    def drain(self, name: str, *, drained: bool) -> None:
        """Note that an operator has taken a backend out of use, or back."""
        if backend := self._backends.get(name):
            backend.drained, self.moved = drained, True

    def state(self, name: str) -> State:
        return self._backends[name].state

    def status(self, name: str, now: float) -> dict[str, str | float]:
        """Return the state of a backend, its reason in two forms, and the seconds in it."""
        backend = self._backends[name]
        return {
            "state": backend.state,
            "reason": backend.reason,
            "why": backend.why,
            "state_s": round(now - backend.since, 1),
        }

    def counts(self, name: str) -> Mapping[tuple[State, Reason], int]:
        """Return the number of times the backend has entered each state, by reason."""
        return self._backends[name].transitions

    def new_transitions(self) -> list[Transition]:
        """Return the transitions since the last call, in order."""
        transitions, self._unseen = self._unseen, []
        return transitions

    # Results of probes.

    def probe_passed(self, name: str, now: float) -> None:
        """Note that /health is good, and that the backend does not sleep."""
        if backend := self._backends.get(name):
            backend.failed_probes = 0
            if backend.state not in SILENT:
                return
            held = backend.state == "down" and now < backend.held_until
            up = _up_models(self._backends.values())
            if not held or up.only_its(backend.models, up=False) != NOTHING:
                self._enter(backend, "up", "probe_passed", "its health check passed", now)

    def fell_asleep(self, name: str, now: float) -> None:
        """Note that /health is good, but that the backend sleeps. Its cache is lost."""
        if (backend := self._backends.get(name)) and backend.state != "asleep":
            self._enter(backend, "asleep", "asleep", "vLLM's sleep mode", now)

    def probe_failed(self, name: str, why: str, now: float) -> None:
        """Note that /health answered something else, or nothing in time."""
        if backend := self._backends.get(name):
            backend.failed_probes += 1
            if backend.state == "down":
                backend.why = why
            elif backend.failed_probes >= FAILED_PROBES:
                self._enter(backend, "down", "probes_failed", why, now)

    # Results of requests.

    def sent(self, name: str, request_id: str, predicted_s: float, now: float) -> None:
        """Note a request that is sent. `predicted_s` is inf if its first token cannot be seen."""
        if backend := self._backends.get(name):
            backend.waiting[request_id] = now, predicted_s

    def answered(self, name: str, request_id: str, now: float) -> None:
        """Note a good first byte, or a rejection that is the client's own fault."""
        if not (backend := self._backends.get(name)):
            return
        backend.failures = backend.refusals = backend.fulls = 0
        sent_at, predicted_s = backend.waiting.pop(request_id, (now, inf))
        ratio = 0.0 if predicted_s == inf else _ratio(now - sent_at, predicted_s)
        if sent_at < backend.since:
            return  # sent before the backend was taken out: this answer proves nothing
        if ratio:
            backend.ratios.append((now, ratio))
        if backend.state == "half_open" or (
            backend.state == "ejected" and backend.intake.most_prefills == ANY
        ):
            if ratio and ratio > FAR_OFF * _peers_ratio(backend, self._median_ratios(now)):
                self._enter(backend, "ejected", "trial_late", "first tokens are still late", now)
            else:
                self._enter(backend, "up", "served", "it has answered a request", now)

    def failed(
        self, name: str, request_id: str, now: float, *, refused: bool = False, sent_at: float = inf
    ) -> None:
        """Note a failure before the first byte: connection refused or lost, 5xx, time-out.

        Args:
            sent_at: when the request was sent, if `left` has been called for it.
        """
        if not (backend := self._backends.get(name)):
            return
        sent_at = min(sent_at, backend.waiting.pop(request_id, (now, 0.0))[0])
        if backend.state in SILENT or sent_at < backend.since:
            return
        backend.failures += 1
        backend.refusals = backend.refusals + 1 if refused else 0
        if backend.refusals >= FAILURES:
            self._enter(backend, "down", "connections_refused", "refuses connections", now)
        elif backend.state == "half_open":
            self._enter(backend, "ejected", "trial_failed", "its trial failed", now)
        elif backend.state == "up" and backend.failures >= FAILURES:
            why = f"{FAILURES} failures in a row"
            self._enter(backend, "ejected", "failures", why, now)

    def full(self, name: str, request_id: str, now: float, retry_after_s: float = 0.0) -> None:
        """Note that the backend reports to be full: no failure, but no room for a moment."""
        if not (backend := self._backends.get(name)):
            return
        backend.waiting.pop(request_id, None)
        backend.failures = backend.refusals = 0
        if now >= backend.full_until:  # requests sent together are rejected together: count once
            doubled_s = FULL_S * 2 ** min(backend.fulls, 8)
            backend.fulls += 1
            backend.full_until = now + min(LONGEST_FULL_S, max(doubled_s, retry_after_s))
            self.moved = True

    def left(self, name: str, request_id: str, now: float = inf) -> float:
        """Note an end before the first byte that proves nothing, or not yet.

        Returns when the request was sent, or `now` if that is not known.
        """
        backend = self._backends.get(name)
        return backend.waiting.pop(request_id, (now, inf))[0] if backend else now

    # Conclusions.

    def look_for_gray(self, now: float) -> None:
        """Eject the backend that is latest against prediction, if its peers are not late.

        It takes a median of up to HISTORY numbers per backend, so call it once a second.
        """
        worst, worst_ratio = None, 0.0
        ratios = self._median_ratios(now)
        for backend, ratio in ratios.items():
            if ratio <= max(worst_ratio, FAR_OFF):
                continue  # no need to look at its peers
            if ratio > FAR_OFF * _peers_ratio(backend, ratios):
                worst, worst_ratio = backend, ratio
        if worst is not None:
            why = f"first tokens {worst_ratio:.1f} times as late as predicted"
            self._enter(worst, "ejected", "late", why, now)

    def intakes(self, now: float) -> list[Intake]:
        """Return the changes since the last call. Backends that may be sent more come first."""
        for backend in self._backends.values():
            if backend.state == "ejected" and now >= backend.held_until:
                self._enter(backend, "half_open", "trial", backend.why, now)
        self.moved = False
        changed = []
        up = _up_models(self._backends.values())
        for backend in self._backends.values():
            only = up.only_its(backend.models, up=backend.available)
            most = _most(backend, only, now)
            limited_to = only if backend.state == "ejected" and only else None
            intake = Intake(backend.name, most, backend.restarted, limited_to)
            if intake != backend.intake:
                changed.append((most <= backend.intake.most_prefills, intake))
                backend.intake = intake
        changed.sort(key=lambda change: change[0])
        return [intake for _, intake in changed]

    def wake_at(self, now: float) -> float:
        """Return the next time at which a state changes without an event, or inf."""
        at = inf
        for backend in self._backends.values():
            if backend.state == "ejected":
                at = min(at, backend.held_until)
            if now < backend.full_until:
                at = min(at, backend.full_until)
        return at

    def _median_ratios(self, now: float) -> dict[_Backend, float]:
        """Return the median ratio of each backend that takes work, from GRAY_LEAST ratios up."""
        return {
            backend: median(ratios)
            for backend in self._backends.values()
            if backend.available and len(ratios := backend.lately(now)) >= GRAY_LEAST
        }

    def _enter(self, backend: _Backend, state: State, reason: Reason, why: str, now: float) -> None:
        self.moved = True
        backend.enter(state, reason, why, now)
        self._unseen.append(Transition(backend.name, state, reason, why))


def _peers_ratio(backend: _Backend, ratios: Mapping[_Backend, float]) -> float:
    """Return the median of the other backends' ratios, at least 1, or inf without peers.

    At least 1, because three times later than a peer that is early is not late.
    """
    others = [ratios[o] for o in ratios if o is not backend and o.shares_models(backend)]
    return max(1.0, median(others)) if others else inf


def _up_models(backends: Iterable[_Backend]) -> UpModels:
    return UpModels(backend.models for backend in backends if backend.available)


def _most(backend: _Backend, only: frozenset[str] | None, now: float) -> float:
    """Return the number of prefills at once: ANY, 1, 0 or NONE.

    A backend out of rotation gets ANY where no backend that is up serves its models (panic).
    """
    if backend.state in SILENT or (backend.state == "ejected" and only == NOTHING):
        return NONE
    if now < backend.full_until:
        return 0.0
    return 1.0 if backend.state == "half_open" and only is not None else ANY
