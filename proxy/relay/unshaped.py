"""Forward requests to paths that are not shaped, such as /v1/models and /v1/embeddings.

They pass no queue. Backends that take work get them in turn, as far as a limit for each backend and
tenant allows (`backends/passing.py`). A failure is retried within the same budget as for shaped
requests. Weights and service classes do not count here.
"""

from aiohttp import web

from forebay.proxy.api.dialects.usage import usage_tokens
from forebay.proxy.backends.failures import NO_MODEL, Failure
from forebay.proxy.backends.link import BackendLink, must_be_home
from forebay.proxy.backends.models import Wanted
from forebay.proxy.backends.passing import LEAST_TOKENS
from forebay.proxy.backends.pool import Backends
from forebay.proxy.backends.retries import Tries
from forebay.proxy.config.paths import ENGINELESS
from forebay.proxy.http1 import errors
from forebay.proxy.http1.headers import to_backend
from forebay.proxy.http1.server.byte_budget import RequestMemory
from forebay.proxy.relay.attempts import Attempts
from forebay.proxy.relay.backend_request import BackendRequest, StreamListener
from forebay.proxy.relay.lessons import note_cut
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.record import RequestRecord
from forebay.traces.ground.sse import read_object


class UnshapedRelay:
    """Serves requests that are not shaped."""

    def __init__(self, attempts: Attempts, backends: Backends, metrics: ProxyMetrics) -> None:
        self._attempts = attempts
        self._backends = backends
        self._metrics = metrics

    async def serve(
        self,
        incoming: web.BaseRequest,
        target: str,
        body: bytes,
        *,
        model: Wanted,
        record: RequestRecord,
        memory: RequestMemory,
        reply_headers: dict[str, str],
        home: str = "",
        observed: bool = False,
    ) -> web.StreamResponse:
        """Forward a request to any backend that takes work. Raises ApiError.

        Args:
            target: an allowed raw path with its query.
            model: where its `route` is "", any backend may have it.
            record: names the tenant and the estimated work; it gets the backend and the usage.
            reply_headers: our headers of the response.
            home: the only backend that can answer; "": any.
            observed: as of `BackendRequest`.
        """
        request = BackendRequest(
            incoming=incoming,
            # A HEAD request is forwarded as GET, and its response is sent without the body.
            method="POST" if incoming.method == "POST" else "GET",
            target=target,
            body=body,
            headers=to_backend(
                incoming.headers, record.upstream_id, authorization=not record.tenant
            ),
            model=model.route,
            reply_headers=lambda: reply_headers,
            memory=memory,
            observed=observed,
            wrote=record.wrote,
        )
        # Ask a backend, and after a failure another one, within the budget.
        failure: Failure | None = None
        path, route = target.partition("?")[0], model.route
        tenant, tokens = record.counts_as, _work_tokens(request, path, record)
        link = (
            must_be_home(self._backends.links, home)
            if home
            else self._backends.next_up(path, route, None, tenant, tokens)
        )
        with Tries(self._attempts.budget) as tries:
            while link is not None:
                async with self._backends.passed_on.slot(link, tenant, tokens):
                    try:
                        with self._attempts.start(link, tries, route) as attempt:
                            record.backend = link.name
                            listener = UnshapedListener(record, self._metrics, self._backends, link)
                            response = await self._attempts.ask(attempt, request, listener)
                    except Failure as failed:
                        failure = failed
                        self._note_failure(link, failed, model, tries)
                        # A refused connection is no attempt, but nothing else bounds their number.
                        retry = "lost" if failed.retry == "refused" else failed.retry
                        again = not home and await self._attempts.may_retry(link, retry, tries)
                        link = (
                            self._backends.next_up(path, route, link, tenant, tokens)
                            if again
                            else None
                        )
                        continue
                    # A response that needs no engine proves as little as /health. If it counted, a
                    # backend that fails all else would stay in use while /v1/models is polled.
                    if tokens:
                        self._backends.answered(link.name, "", tries.suspects)
                    lacked = failure is not None and failure.kind == NO_MODEL
                    if lacked and response.status == 200:
                        self._backends.models.learn(link, model.name)
                    if isinstance(response, web.Response):
                        _note_usage(record, response)
                        return response
                    return await response.relay()
        if failure is None:
            raise errors.no_backend()
        return failure.result()

    def _note_failure(
        self, link: BackendLink, failure: Failure, model: Wanted, tries: Tries
    ) -> None:
        self._backends.failed(link.name, "", failure, tries.suspects, model.route)
        self._metrics.upstream_error(link.name, failure.kind)
        if failure.kind == NO_MODEL:
            self._backends.models.forget(link, model.name)


def _work_tokens(request: BackendRequest, path: str, record: RequestRecord) -> int:
    """Return the work of a request for the engine, 0 if the API server alone answers it."""
    if request.method != "POST" or path in ENGINELESS:
        return 0
    return max(LEAST_TOKENS, record.estimated_tokens)


def _note_usage(record: RequestRecord, response: web.Response) -> None:
    """Record the usage that a whole response reports, if it reports any."""
    if not record.path or response.status != 200:
        return
    fields = read_object(response.body) if isinstance(response.body, bytes) else None
    prompt_tokens, cached_tokens, output_tokens = usage_tokens((fields or {}).get("usage"))
    record.used(prompt_tokens, cached_tokens or 0, output_tokens)


class UnshapedListener(StreamListener):
    """Reports responses that were cut."""

    __slots__ = ("_noted",)

    def __init__(
        self, record: RequestRecord, metrics: ProxyMetrics, backends: Backends, link: BackendLink
    ) -> None:
        self._noted = record, metrics, backends, link

    def cut(self, limit: str) -> None:
        note_cut(*self._noted, limit)
