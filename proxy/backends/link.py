"""One backend as the network sees it, and the choices among several of them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from forebay.proxy.backends.models import Entries, LearnedEntry, configured_models
from forebay.proxy.backends.salt_support import UNASKED, Salting
from forebay.proxy.config.backends import BackendConfig, rank_of
from forebay.proxy.core.health import NONE, State, Transition
from forebay.proxy.core.model import serves
from forebay.proxy.http1 import errors
from forebay.proxy.http1.client.client import Origin
from forebay.proxy.log_events import LogEvent, Say

MOST_LEARNED = 64  # models of one backend that it serves without naming them
STATE_EVENTS: dict[State, LogEvent] = {
    "up": LogEvent.BACKEND_UP,
    "down": LogEvent.BACKEND_DOWN,
    "asleep": LogEvent.BACKEND_DOWN,
    "ejected": LogEvent.BACKEND_EJECTED,
    "half_open": LogEvent.BACKEND_HALF_OPEN,
}


@dataclass(slots=True)
class BackendLink:
    """One backend as the network sees it.

    Attributes:
        drained: an operator has taken it out of use, regardless of its health.
        poke: set to probe the backend now, not at the next interval.
        probed: set when its first probe is over.
        silent: it has gone down or to sleep: its running responses will not go on.
        heard: the backend has sent something since the last probe began.
        declined_at: when it last answered that it is busy or broken; -inf once it has served since.
        kv_tokens: size of its KV cache, as configured or reported by its metrics; inf if unknown.
        prefix_caching: False if its metrics say that it caches no prompts.
        ask_size_at: when to ask for that size (again); inf once it is known.
        models: the models that it serves, as configured or by its /v1/models; None if unknown.
        lost_model: the main model that it served before; "" once it has served a request since.
        only: while it is ejected, requests for these models still go to it: no other serves them.
        ask_models_at: when to ask for them (again); inf if they are configured or never told.
        salting: paths on which it drops the salt of a tenant's cache, and on which it may.
        ask_salts_at: when to ask for them (again); inf once that is known, or never told.
        may_sleep: its server tells whether it sleeps, or has not been asked.
    """

    config: BackendConfig
    origin: Origin
    up: bool = False
    drained: bool = False
    poke: asyncio.Event = field(default_factory=asyncio.Event)
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    silent: bool = False
    heard: bool = False
    declined_at: float = -inf
    kv_tokens: float = inf
    prefix_caching: bool = True
    ask_size_at: float = -inf
    most_prefills: float = NONE
    models: Entries | None = None
    lost_model: str = ""
    only: frozenset[str] | None = None
    ask_models_at: float = -inf
    salting: Salting = UNASKED
    ask_salts_at: float = -inf
    may_sleep: bool = True
    added_at: float = -inf
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.config.name
        self.use_models(self.config.models)

    @property
    def cache_text(self) -> str:
        """The size of its KV cache, as the log says it."""
        off = "" if self.prefix_caching else "; prefix caching is off, so it shares no prompts"
        return f"KV cache of {self.kv_tokens:,.0f} tokens{off}"

    def serves(self, model: str) -> bool:
        """True if it serves the model, as far as is known. "" is any model."""
        if self.only is not None:
            return model in self.only
        return serves(self.models, model)

    def replace_models(self, models: Entries) -> None:
        """Use the models that the server lists now, its main model first."""
        lost = self.lost_model or next(iter(self.models or {}), "")
        self.models, self.lost_model = models, "" if lost in models else lost

    def learn_model(self, name: str) -> None:
        """Add a model that it serves without naming it. The oldest of too many is forgotten."""
        if not self.models or name in self.models:
            return
        base = next(iter(self.models))
        learned = [model for model, entry in self.models.items() if isinstance(entry, LearnedEntry)]
        if len(learned) >= MOST_LEARNED:
            self.forget_model(learned[0])
        entry = LearnedEntry(id=name, object="model", created=0, owned_by="vllm", parent=base)
        self.models = {**self.models, name: entry}

    def forget_model(self, name: str) -> bool:
        """Forget a model that was learned. True if it was."""
        models = self.models or {}
        if not isinstance(models.get(name), LearnedEntry):
            return False
        self.models = {model: entry for model, entry in models.items() if model != name}
        return True

    def ask_again(self) -> None:
        """Ask for all that it tells at once: an answer may have depended on the key."""
        self.ask_size_at = self.ask_salts_at = -inf
        self.may_sleep = True
        self.use_models(self.config.models)
        self.poke.set()

    def use_models(self, names: Sequence[str]) -> None:
        """Use the configured models. Without any, the known models stay until the next probe."""
        self.models = configured_models(names) or self.models
        self.ask_models_at = inf if names else -inf


def any_up(links: Mapping[str, BackendLink], model: str = "") -> bool:
    """True if a backend of the model is up. "" is any model."""
    return any(link.up and link.serves(model) for link in links.values())


def others(
    links: Mapping[str, BackendLink], link: BackendLink | None, model: str
) -> list[BackendLink]:
    """Return the other backends of a model."""
    return [other for other in links.values() if other is not link and other.serves(model)]


def up_besides(
    links: Mapping[str, BackendLink], but: BackendLink | None, model: str
) -> list[BackendLink]:
    """Return the other backends of a model that are up, at other servers if possible."""
    up = [other for other in others(links, but, model) if other.up]
    if but is None:
        return up
    return [other for other in up if not _at_one_server(other, but)] or up


def _at_one_server(link: BackendLink, other: BackendLink) -> bool:
    """True if two backends are lanes of one server, or the same backend."""
    return link.config.url == other.config.url


def lanes_beside(links: Mapping[str, BackendLink], link: BackendLink | None) -> list[BackendLink]:
    """Return the backends at the same server: all of its lanes, or the backend itself.

    None, a backend that has left, has none.
    """
    if link is None:
        return []
    if rank_of(link.config) is None:
        return [link]
    return [lane for lane in links.values() if _at_one_server(lane, link)]


def must_be_home(links: Mapping[str, BackendLink], name: str) -> BackendLink | None:
    """Return the backend of this name, or None if unknown. Raises ApiError 503 if it is down.

    Only it can answer, so no other backend is asked until it is back.
    """
    link = links.get(name)
    if link is not None and not link.up:
        raise errors.no_backend()
    return link


def say_transition(say: Say, transition: Transition, link: BackendLink) -> None:
    """Log a change of a backend's state."""
    name, state, reason, why = transition
    line = f"backend {name} is {state.replace('_', '-')}"
    if state != "up":
        line += f" ({why})"
    elif link.kv_tokens < inf:
        line += f", {link.cache_text}"
    if state == "half_open":
        line += "; it is sent one request at a time"
    say(STATE_EVENTS[state], line, name, reason)
