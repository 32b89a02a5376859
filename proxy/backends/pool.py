"""Talk to the backends: send requests, and let health decisions take effect.

Which backends take new work is decided in `core/health.py`, from probes (`probes.py`) and from the
outcome of requests. Here its decisions meet sockets and the clock.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from math import inf

from forebay.proxy.backends.failures import Failure, FaultLog
from forebay.proxy.backends.link import (
    BackendLink,
    any_up,
    lanes_beside,
    others,
    say_transition,
    up_besides,
)
from forebay.proxy.backends.model_search import ModelSearch
from forebay.proxy.backends.passing import PassedOn
from forebay.proxy.backends.probes import Prober
from forebay.proxy.backends.retries import Suspects, Suspicions
from forebay.proxy.backends.salt_support import SaltSupport
from forebay.proxy.backends.served_models import ServedModels
from forebay.proxy.config.backends import BackendConfig, rank_header
from forebay.proxy.config.schema import Config
from forebay.proxy.core.health import ANY, NONE, SILENT, Health, Intake
from forebay.proxy.core.model import Send
from forebay.proxy.driver import Driver
from forebay.proxy.http1.client.backend_errors import LostConnection
from forebay.proxy.http1.client.client import Origin
from forebay.proxy.http1.client.connection import UpstreamResponse
from forebay.proxy.log_events import LogEvent, Say

STALE_WITHIN_S = 0.5  # a kept connection that is lost so soon was closed while idle
GRAY_EVERY_S = 0.5  # between two looks for backends that are slow
DECLINED_S = 10.0  # a backend that declined is no alternative for this long


class Backends:
    """All backends. Use as a context.

    Args:
        say: logs a line when a backend comes up or goes down.
        tls: checks of https URLs; by default the system's authorities.

    Attributes:
        models: which backends serve which model.
        passed_on: limits the requests that pass no queue.
        search: looks for a model that no backend names.
        salts: on which paths the backends drop the salt of a tenant's cache.
        faults: logs malformed and limited answers.
        on_hang: called at every probe of a backend that is down, to end attempts there.
    """

    def __init__(
        self,
        config: Config,
        driver: Driver,
        say: Say,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        # The services that it uses, and the state of backends as requests have shown it.
        self._config = config
        self._tls = tls
        self._driver = driver
        self._say = say
        self._turns: Counter[str] = Counter()  # by path
        self._suspicions = Suspicions()
        self.faults = FaultLog(say, driver.clock)
        self.passed_on = PassedOn(
            driver,
            lambda: self._config.timeouts.first_token,
            lambda: self._config.reject_status,
            lambda: self._config.mode == "observe",
        )
        self._intakes: dict[str, Intake] = {}  # the latest of each backend
        self._serving = False  # some backend was up when health was last applied
        # The backends, their health and their models, and the probes that report both.
        self.links = {b.name: self._link(b) for b in config.backends}
        self.salts = SaltSupport(self.links, say)
        self.health = Health(self.links, driver.clock())
        self.models = ServedModels(self.links, self.health, driver, say)
        self.prober = Prober(
            config,
            self.health,
            driver.clock,
            say,
            self._after_probe,
            self._size_known,
            self.models.changed,
            self.salts.known,
        )
        self.on_hang: Callable[[BackendLink], None] = lambda _: None
        self._timer: asyncio.TimerHandle | None = None
        self._gray_at = -inf
        self.search = ModelSearch(self.models, self.prober, driver.clock)

    def _link(self, config: BackendConfig) -> BackendLink:
        origin = Origin(config.url, self._config.timeouts.connect, self._tls, rank_header(config))
        origin.key = self._config.key_header()
        return BackendLink(config, origin, added_at=self._driver.clock())

    async def __aenter__(self) -> "Backends":
        self.models.apply(self._config.models)
        for link in self.links.values():
            self.prober.start(link)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.prober.close()
        self.search.close()
        if self._timer is not None:
            self._timer.cancel()
        for link in self.links.values():
            link.origin.close()

    async def wait_probed(self) -> None:
        """Wait until each backend has been probed once, regardless of the result."""
        await asyncio.gather(*(link.probed.wait() for link in self.links.values()))

    # Changes by a reload (`reload.py`).

    def reconfigure(self, config: Config) -> None:
        """Use new timeouts, health checks, keys and KV sizes. `join`, `move`, `leave` do the rest.

        A new KV size is set here and asked for at once: a later pause or trial would otherwise
        bring the old one back.
        """
        size, before = config.affinity.kv_tokens, self._config.affinity.kv_tokens
        other_key = config.upstream_api_key != self._config.upstream_api_key
        self._config = self.prober.config = config
        for link in self.links.values():
            link.origin.connect_s = config.timeouts.connect
            link.origin.key = config.key_header()
            if other_key:
                link.ask_again()
            if size != before:
                link.kv_tokens = inf if size == "auto" else float(size)
                link.ask_size_at = -inf if size == "auto" else inf
                link.poke.set()
        for backend in config.backends:
            present = self.links.get(backend.name)
            if present is not None and present.config.models != backend.models:
                present.use_models(backend.models)
                present.poke.set()
            if present is not None:
                present.config = backend

    async def join(self, config: BackendConfig) -> None:
        """Add a backend. Returns after its first probe."""
        link = self.links[config.name] = self._link(config)
        self.health.add(config.name, self._driver.clock())
        self.models.apply(self.models.aliases)
        self.prober.start(link)
        for lane in lanes_beside(self.links, link):
            lane.poke.set()  # from now on they are probed at one time
        await link.probed.wait()

    async def move(self, config: BackendConfig) -> None:
        """Switch a backend to another URL. Running requests finish at the old URL."""
        link = self._link(config)
        problem = await self.prober.check(link)
        self.prober.stop(config.name)
        link.drained = self.links[config.name].drained
        self._intakes.pop(config.name, None)
        self.links[config.name].origin.close()
        self.links[config.name] = link
        self.health.remove(config.name)
        self.health.add(config.name, self._driver.clock())
        self.health.drain(config.name, drained=link.drained)
        self.models.apply(self.models.aliases)
        if problem is None:
            self.health.probe_passed(config.name, self._driver.clock())
        else:
            line = f"backend {config.name} is unreachable at its new address ({problem})"
            self._say(LogEvent.BACKEND_UNREACHABLE, line, config.name)
            self._driver.backend_down(config.name)
        self._apply_health()
        self.prober.start(link)

    def leave(self, name: str) -> None:
        """Send the backend no new work."""
        self.prober.stop(name)
        self.links[name].up = False
        self.health.remove(name)
        self._apply_changed_health()  # it may have been the last one

    def forget(self, name: str) -> None:
        """Remove a backend that has left and has no running requests."""
        self.links.pop(name).origin.close()
        self._intakes.pop(name, None)
        self.passed_on.forget(name)
        self.models.apply(self._config.models)

    # Changes by an operator.

    def drain(self, name: str, *, drained: bool) -> None:
        """Stop new work for a backend, or allow it again as far as the health permits."""
        link = self.links[name]
        if drained == link.drained:
            return
        link.drained = drained
        self.health.drain(name, drained=drained)
        what = "is draining: it gets no new work" if drained else "takes work again"
        self._say(LogEvent.BACKEND_DRAINING, f"backend {name} {what}", name)
        if drained:
            link.up = False
            self._driver.backend_down(name, keeps_cache=True)
        elif name in self._intakes:  # else it has never been up
            self._apply_intake(self._intakes[name])
        self._apply_health()  # it may have been the last one

    # Sending.

    async def open(
        self,
        method: str,
        link: BackendLink,
        target: str,
        body: bytes,
        headers: dict[str, str],
        model: str = "",
        wrote: Callable[[], None] | None = None,
    ) -> UpstreamResponse:
        """Send one request, and wait for the head of its response. Raises UpstreamFault.

        Redirects are not followed: the target could be anywhere. A backend may close an idle
        connection while a request is on its way on it. This proves nothing against the backend. If
        there is no other backend, it is asked again on a new connection.

        Args:
            target: an allowed raw path with its query.
            model: as `Request.model`.
            wrote: called when the head was written.
        """
        sent_at = self._driver.clock()
        try:
            return await link.origin.ask(method, target, headers, body, wrote=wrote)
        except LostConnection as lost:
            # Later it is not that race: perhaps the backend died over this very request.
            raced = lost.stale and self._driver.clock() - sent_at < STALE_WITHIN_S
            if not raced or self.others_up(link, model):
                raise
        return await link.origin.ask(method, target, headers, body, fresh=True, wrote=wrote)

    def any_up(self, model: str = "") -> bool:
        """True if a backend of the model is up. "" is any model."""
        return any_up(self.links, model)

    def next_up(
        self, path: str, model: str = "", but: BackendLink | None = None, tenant: str = "",
        tokens: int = 0,
    ) -> BackendLink | None:  # fmt: skip
        """Choose a backend that takes work, in rotation, for a request that is not shaped.

        A backend with a pause or a trial is avoided while there is another. So is `but`'s server.

        Args:
            path: each has a rotation of its own, so that a client's pattern of paths loads none.
            model: as `Request.model`.
            tenant, tokens: as in `PassedOn.slot`; a backend with room for them goes first.
        """
        up = up_besides(self.links, but, model)
        others = [u for u in up if u.most_prefills == ANY] or up
        others = [u for u in others if self.passed_on.has_room(u, tenant, tokens)] or others
        self._turns[path] += 1
        return others[self._turns[path] % len(others)] if others else None

    def others_up(self, link: BackendLink, model: str) -> bool:
        return any(other.up for other in others(self.links, link, model))

    def others_willing(self, link: BackendLink, model: str) -> bool:
        """True if another backend is up that has not recently declined a request itself."""
        lately = self._driver.clock() - DECLINED_S
        peers = others(self.links, link, model)
        return any(other.up and other.declined_at < lately for other in peers)

    # Outcomes of requests.

    def sent(self, send: Send, *, shows_first_token: bool) -> None:
        """A request has been sent to its backend."""
        self.passed_on.seen(send.backend, send.request.tenant)
        if not send.request.pure:
            shows_first_token = False  # it also shows how long an image took, or a grammar
        predicted_s = send.predicted_ttft_s if shows_first_token else inf
        self.health.sent(send.backend, send.request.id, predicted_s, self._driver.clock())

    def answered(self, name: str, request_id: str, suspects: Suspects) -> None:
        """A good first byte has come, or an error that is the client's own fault.

        So the request was not the cause where it failed before.
        """
        if link := self.links.get(name):
            link.declined_at, link.lost_model = -inf, ""
        self.health.answered(name, request_id, self._driver.clock())
        for suspect, sent_at in self._suspicions.answered(name, suspects):
            self.health.failed(suspect, "", self._driver.clock(), sent_at=sent_at)
        self._apply_changed_health()

    def failed(
        self, name: str, request_id: str, failure: Failure, suspects: Suspects, model: str
    ) -> None:
        """A request for this model has failed before a good first byte."""
        # A declined request is passed on only while some other backend may take it.
        health, now = self.health, self._driver.clock()
        self.faults.came(name, failure.kind)
        self.faults.limited(name, failure.limit)
        link, everywhere = self.links.get(name), False
        if failure.declined and link:
            link.declined_at = now
            others_up = self.others_up(link, model)
            everywhere = others_up and not self.others_willing(link, model)
        # The verdict decides what health learns from the failure.
        match failure.verdict:
            case "failed" if failure.provokable:
                sent_at = health.left(name, request_id, now)
                self._suspicions.failed(name, sent_at, now, suspects, everywhere=everywhere)
            case "failed":
                health.failed(name, request_id, now)
            case "refused":
                health.failed(name, request_id, now, refused=True)
                for lane in lanes_beside(self.links, link):
                    if lane is not link:
                        health.failed(lane.name, "", now, refused=True)
                    lane.poke.set()
            case "full":
                health.full(name, request_id, now, failure.retry_after_s)
            case "answered":
                health.answered(name, request_id, now)
            case "nothing":
                health.left(name, request_id)
        self._apply_changed_health()

    def cancelled(self, name: str, request_id: str) -> None:
        """The client has left before the first byte."""
        self.health.left(name, request_id)

    # Effects of health on the policy.

    def _after_probe(self, link: BackendLink) -> None:
        now = self._driver.clock()
        for sent_at in self._suspicions.due(link.name, now):
            self.health.failed(link.name, "", now, sent_at=sent_at)
        if now >= self._gray_at:  # looked for in all at once, however many are probed
            self._gray_at = now + GRAY_EVERY_S
            self.health.look_for_gray(now)
        self._apply_changed_health()
        if self.health.state(link.name) in SILENT:
            self.on_hang(link)

    def _size_known(self, link: BackendLink, reported: bool) -> None:
        if reported:
            line = f"backend {link.name} has a {link.cache_text}"
            self._say(LogEvent.BACKEND_KV_CACHE, line, link.name)
        self._driver.backend_up(link.name, link.kv_tokens, link.most_prefills)

    def _apply_changed_health(self) -> None:
        if self.health.moved:
            self._apply_health()

    def _apply_health(self, at: float = -inf) -> None:
        # The loop may fire a hair early: use at least the time the timer was set for.
        now = max(at, self._driver.clock())
        for intake in self.health.intakes(now):
            self._apply_intake(intake)
        for transition in self.health.new_transitions():
            link = self.links[transition.backend]
            link.silent = transition.state in SILENT
            say_transition(self._say, transition, link)
        if self._serving and not self.any_up():
            self._say(LogEvent.NO_BACKEND, "cannot serve: no backend takes work; requests get 503")
        self._serving = self.any_up()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.health.wake_at(now)
        if at < inf:
            self._timer = asyncio.get_running_loop().call_at(at, self._apply_health, at)

    def _apply_intake(self, intake: Intake) -> None:
        link = self.links[intake.backend]
        self._intakes[intake.backend] = intake
        link.up = intake.most_prefills != NONE and not link.drained
        link.most_prefills = intake.most_prefills
        self.models.keep_only(intake.backend, intake.only)
        if not link.up:
            self._driver.backend_down(link.name, not intake.restarted)
            return
        self._driver.backend_up(link.name, link.kv_tokens, intake.most_prefills)
        self.models.pulse()
