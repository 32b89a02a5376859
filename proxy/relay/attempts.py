"""Attempts: one request at one backend, until its response is known to be good.

An attempt is limited in time. Every way in which it can fail becomes a `Failure` (`failures.py`),
which says whether another backend may be asked.
"""

from dataclasses import dataclass
from typing import Literal

from forebay.proxy.backends.failures import ONLY_HEARTBEATS, Failure
from forebay.proxy.backends.link import BackendLink
from forebay.proxy.backends.pool import Backends
from forebay.proxy.backends.retries import Retry, RetryBudget, Tries
from forebay.proxy.config.schema import Config
from forebay.proxy.driver import Grant
from forebay.proxy.http1 import errors
from forebay.proxy.http1.client.backend_errors import (
    BrokenAnswer,
    ConnectFault,
    LocalShortage,
    LostConnection,
    OwnLimit,
)
from forebay.proxy.relay.backend_request import BackendRequest, StreamListener
from forebay.proxy.relay.exchange import Answer, exchange
from forebay.proxy.relay.stream import UPSTREAM_ERRORS
from forebay.proxy.relay.timeouts import Limit, StalledUpstream, Watchdog


@dataclass(slots=True, eq=False)
class Attempt:
    """One request at one backend. Active while its `with` block runs.

    Attributes:
        active: all attempts that are active.
        model: as `Request.model`.
        ended: why the proxy ended the attempt before its time limit, or "".
    """

    link: BackendLink
    tries: Tries
    limit: Limit
    active: "dict[Attempt, None]"
    model: str
    ended: Literal["", "hang", "draining"] = ""

    def __enter__(self) -> "Attempt":
        self.active[self] = None
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        del self.active[self]

    def end(self, why: Literal["hang", "draining"]) -> None:
        if not self.ended and not self.limit.expired:
            self.ended = why
            self.limit.end()


@dataclass(slots=True, eq=False, kw_only=True)
class ShapedAttempt(Attempt):
    """An attempt whose outcome is reported to the backend's health when the block ends."""

    backends: Backends
    request_id: str

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        name = self.link.name
        try:
            if isinstance(error, Failure):
                suspects = self.tries.suspects
                self.backends.failed(name, self.request_id, error, suspects, self.model)
            elif error is not None:
                self.backends.cancelled(name, self.request_id)
        finally:
            del self.active[self]
        if error is None:
            self.backends.answered(name, self.request_id, self.tries.suspects)


class Attempts:
    """Starts attempts, and ends attempts that are late, hang, or outlast a drain.

    Attributes:
        draining: no attempt is started any more.
    """

    def __init__(self, config: Config, backends: Backends, watchdog: Watchdog) -> None:
        self.budget = RetryBudget()
        self._config = config
        self._backends = backends
        self._watchdog = watchdog
        # In order of start: the oldest are the first to be retried when a backend hangs.
        self._active: dict[Attempt, None] = {}
        self.draining = False
        backends.on_hang = self._end_hanging

    def reconfigure(self, config: Config) -> None:
        """Use this configuration for attempts that start from now on."""
        self._config = config

    def start(self, link: BackendLink, tries: Tries, model: str) -> Attempt:
        """Make an attempt for a request that is not shaped. Raises ApiError during a drain."""
        if self.draining:
            raise errors.draining()
        limit = self._watchdog.limit(self._config.timeouts.first_token, "timeouts.first_token")
        return Attempt(link, tries, limit, self._active, model)

    def start_shaped(
        self, grant: Grant, link: BackendLink, tries: Tries, *, shows_first_token: bool
    ) -> ShapedAttempt:
        """Make an attempt for a shaped request. Raises ApiError during a drain.

        Args:
            shows_first_token: the response is a stream, or its end is its first token.
        """
        if self.draining:
            raise errors.draining()
        self._backends.sent(grant.send, shows_first_token=shows_first_token)
        timeouts = self._config.timeouts
        if shows_first_token:
            limit = self._watchdog.limit(timeouts.first_token, "timeouts.first_token")
        else:
            limit = self._watchdog.limit(timeouts.whole_answer, "timeouts.answer")
        request, backends = grant.send.request, self._backends
        of_any = link, tries, limit, self._active, request.model
        return ShapedAttempt(*of_any, backends=backends, request_id=request.id)

    async def ask(
        self, attempt: Attempt, request: BackendRequest, listener: StreamListener
    ) -> Answer:
        """Ask the backend of an attempt. Raises Failure on a fault or past the time limit."""
        request.heartbeats = False  # this attempt has had no heartbeat yet
        try:
            with attempt.limit:
                return await exchange(
                    request, attempt.link, listener,
                    backends=self._backends, watchdog=self._watchdog,
                    limits=self._config.limits,
                )  # fmt: skip
        except TimeoutError as error:
            raise _timeout_failure(attempt, request) from error
        except UPSTREAM_ERRORS as error:
            raise _failure_of(error) from error

    async def may_retry(self, link: BackendLink, retry: Retry, tries: Tries) -> bool:
        """True if another backend may be asked after a failure. Counts the retry.

        Where the share of retries is used up, the backend is asked for its health: if it is dead,
        it works on nothing any more, as after a lost connection. An engine that dies fails all of
        its requests at one instant.
        """
        if tries.again(retry):
            return True
        if retry != "shared" or tries.spent:
            return False
        return await self._backends.prober.finds_dead(link) and tries.again("lost")

    def end_all(self) -> None:
        """End every attempt: streams with an error event, the rest with a 503.

        Ending an attempt frees a slot, and the next waiting request may be sent to it. That
        attempt is a 503 at once.
        """
        self.draining = True
        for attempt in self._active:
            attempt.end("draining")
        self._backends.passed_on.end_all(errors.draining)
        self._watchdog.end_all("The proxy is shutting down (timeouts.drain).")

    def _end_hanging(self, link: BackendLink) -> None:
        """End attempts at a backend that hangs, if another backend may be asked instead."""
        for attempt in self._active:
            if attempt.link is link and not (attempt.ended or attempt.tries.spent):
                if not self._backends.others_up(link, attempt.model):
                    continue
                if not attempt.tries.reserve():
                    break
                attempt.end("hang")


def _timeout_failure(attempt: Attempt, request: BackendRequest) -> Failure:
    if attempt.ended == "hang":
        return Failure("hang", errors.upstream_timeout(), "reserved")
    if attempt.ended == "draining":
        return Failure("draining", errors.draining(), "never", "nothing")
    # The prefill may still be running: a second one elsewhere would double the load.
    kind = ONLY_HEARTBEATS if request.heartbeats else "timeout"
    text = f"The backend did not respond within {attempt.limit.text}."
    return Failure(kind, errors.upstream_timeout(text), "never", limit=text)


def _failure_of(error: Exception) -> Failure:
    if isinstance(error, ConnectFault):
        return Failure("connect", errors.no_backend(), "refused", "refused")
    if isinstance(error, LocalShortage):
        # A connection to another backend would need the same resource.
        return Failure("shortage", errors.overloaded(), "never", "nothing")
    if isinstance(error, StalledUpstream):
        text = str(error)
        return Failure("timeout", errors.upstream_timeout(text), limit=text)
    if isinstance(error, OwnLimit):  # as large from another backend
        text = str(error)
        return Failure("too_large", errors.answer_too_large(text), "never", "nothing", limit=text)
    if isinstance(error, BrokenAnswer):
        return Failure(error.kind, errors.upstream_error())
    retry: Literal["lost", "shared"] = "lost" if isinstance(error, LostConnection) else "shared"
    return Failure("before_first_byte", errors.upstream_error(), retry)
