"""Forward requests to paths that are not shaped, such as /v1/models and /v1/embeddings.

They pass no queue. Backends that take work get them in turn, as far as a limit for each backend and
tenant allows (`backends/passing.py`). A failure is retried within the same budget as for shaped
requests. Weights and service classes do not count here.
"""

from aiohttp import web

from forebay.proxy.backends.models import Wanted
from forebay.proxy.backends.passing import LEAST_TOKENS
from forebay.proxy.backends.pool import Backends
from forebay.proxy.backends.probes import Upstream
from forebay.proxy.backends.served_models import must_be_home
from forebay.proxy.config.paths import ENGINELESS
from forebay.proxy.http1 import errors
from forebay.proxy.http1.headers import to_backend
from forebay.proxy.http1.server.byte_budget import RequestMemory
from forebay.proxy.http1.sse import read_object
from forebay.proxy.relay.attempts import Attempts
from forebay.proxy.relay.failures import NO_MODEL, Failure, check_head
from forebay.proxy.relay.relay import usage_tokens
from forebay.proxy.relay.retries import Tries
from forebay.proxy.relay.stream import Stream, StreamListener
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.relay.whole_answer import LargeAnswer
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.record import RequestRecord


class UnshapedRelay:
    def __init__(
        self, attempts: Attempts, backends: Backends, watchdog: Watchdog, metrics: ProxyMetrics
    ) -> None:
        self._attempts = attempts
        self._backends = backends
        self._watchdog = watchdog
        self._metrics = metrics

    async def serve(
        self,
        incoming: web.BaseRequest,
        target: str,
        body: bytes,
        wanted: Wanted,
        record: RequestRecord,
        reply: dict[str, str],
        memory: RequestMemory,
        home: str = "",
    ) -> web.StreamResponse:
        """Forward a request to any backend that takes work; raises ApiError.

        Args:
            target: the raw path with its query.
            wanted: the model; where its `route` is "", any backend may have it.
            reply: our headers of a response that is a stream, or large.
            memory: gets the bytes of the response.
            home: the only backend that can answer; "": any.
        """
        headers = to_backend(incoming.headers, record.upstream_id, authorization=not record.tenant)
        path, model, failure = target.partition("?")[0], wanted.route, None
        tenant, tokens = record.tenant, _work_tokens(incoming, path, record)
        upstream = (
            must_be_home(self._backends.upstreams, home)
            if home
            else self._backends.next_up(path, model, None, tenant, tokens)
        )
        with Tries(self._attempts.budget) as tries:
            while upstream is not None:
                async with self._backends.passed_on.slot(upstream, tenant, tokens):
                    try:
                        with self._attempts.start(upstream, tries, model) as attempt:
                            record.backend = upstream.name
                            asking = self._ask(
                                upstream, incoming, target, body, model, headers, reply, memory,
                                record,
                            )  # fmt: skip
                            response = await self._attempts.within_limit(attempt, asking)
                    except Failure as failed:
                        failure = failed
                        self._failed(upstream, failed, tries, wanted)
                        # A refused connection is no attempt, but nothing else bounds their number.
                        retry = "lost" if failed.retry == "refused" else failed.retry
                        again = not home and tries.again(retry)
                        upstream = (
                            self._backends.next_up(path, model, upstream, tenant, tokens)
                            if again
                            else None
                        )
                        continue
                    # A response that needs no engine proves as little as /health. If it counted, a
                    # backend that fails all else would stay in use while /v1/models is polled.
                    if tokens:
                        self._backends.answered(upstream.name, "", tries.suspects)
                    lacked = failure is not None and failure.kind == NO_MODEL
                    if lacked and response.status == 200:
                        self._backends.models.learn(upstream, wanted.name)
                    if isinstance(response, web.Response):
                        _note_usage(record, response)
                        return response
                    return await response.relay()
        if failure is None:
            raise errors.no_backend()
        return failure.result()

    def _failed(self, upstream: Upstream, failed: Failure, tries: Tries, wanted: Wanted) -> None:
        """Report a failed attempt."""
        self._backends.failed(upstream.name, "", failed, tries.suspects, wanted.route)
        self._metrics.upstream_error(upstream.name, failed.kind)
        if failed.kind == NO_MODEL:
            self._backends.models.forget(upstream, wanted.name)

    async def _ask(
        self,
        upstream: Upstream,
        incoming: web.BaseRequest,
        target: str,
        body: bytes,
        model: str,
        headers: dict[str, str],
        reply: dict[str, str],
        memory: RequestMemory,
        record: RequestRecord,
    ) -> Stream | LargeAnswer | web.Response:
        # A HEAD request is forwarded as GET; its response is sent without the body.
        method = "POST" if incoming.method == "POST" else "GET"
        response = await self._backends.open(
            method, upstream, target, body, headers, model, record.wrote
        )
        relaying = False
        try:
            check_head(response)
            listener = UnshapedStreamListener(self._metrics, upstream)
            streams = response.content_type == "text/event-stream"
            if streams and response.status == 200 and method == "POST":
                stream = Stream(
                    incoming, upstream, response, reply, listener, self._watchdog,
                    memory=memory, dialect=None,
                )  # fmt: skip
                await stream.first_event()
                relaying = True
                return stream
            whole = await self._attempts.read_whole(
                incoming, upstream, response, reply, memory, listener
            )
            relaying = isinstance(whole, LargeAnswer)
            return whole
        finally:
            if not relaying:
                response.close()


def _work_tokens(incoming: web.BaseRequest, path: str, record: RequestRecord) -> int:
    """Return the work of a request for the engine; 0 if the API server alone answers it."""
    if incoming.method != "POST" or path in ENGINELESS:
        return 0
    return max(LEAST_TOKENS, record.estimated_tokens)


def _note_usage(record: RequestRecord, response: web.Response) -> None:
    """Take the usage that a whole response reports, if it reports any."""
    if not record.path or response.status != 200:
        return
    fields = read_object(response.body) if isinstance(response.body, bytes) else None
    prompt_tokens, cached_tokens, output_tokens = usage_tokens((fields or {}).get("usage"))
    record.used(prompt_tokens, cached_tokens or 0, output_tokens)


class UnshapedStreamListener(StreamListener):
    __slots__ = ("_metrics", "_upstream")

    def __init__(self, metrics: ProxyMetrics, upstream: Upstream) -> None:
        self._metrics = metrics
        self._upstream = upstream

    def cut(self) -> None:
        self._metrics.upstream_error(self._upstream.name, "mid_stream")
        self._upstream.poke.set()  # the backend may have died: probe it now
