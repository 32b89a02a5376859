"""Learn from the responses to shaped requests: times, tokens, prompts that an engine now holds."""

from dataclasses import dataclass
from typing import Any

from forebay.proxy.api.token_estimate import TokenEstimate
from forebay.proxy.backends.link import BackendLink
from forebay.proxy.backends.pool import Backends
from forebay.proxy.driver import Grant
from forebay.proxy.kv_events.tokenize import Translator
from forebay.proxy.relay.backend_request import ShapedRequest, StreamListener
from forebay.proxy.relay.kept_responses import KeptResponses
from forebay.proxy.relay.timeouts import Watchdog
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.record import CUT, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """The objects that learn from responses.

    Attributes:
        translator: is offered each prompt that a backend has computed.
        kept: responses that later requests may go on from.
    """

    backends: Backends
    estimate: TokenEstimate
    kept: KeptResponses
    metrics: ProxyMetrics
    translator: Translator
    watchdog: Watchdog


class Lessons(StreamListener):
    """Learns from the response to one shaped request."""

    __slots__ = ("_grant", "_learners", "_learns", "_link", "_shaped")

    def __init__(
        self, learners: Learners, shaped: ShapedRequest, grant: Grant, link: BackendLink
    ) -> None:
        self._learners = learners
        self._learns = True
        self._shaped = shaped
        self._grant = grant
        self._link = link

    def first_event(self) -> None:
        """Report the first output to the policy, the record and the metrics."""
        now, record = self._learners.watchdog.clock(), self._shaped.record
        self._grant.first_token()
        self.prompt_computed()
        if self._shaped.sent is not None and self._shaped.outgoing is not None:
            record.continued_after = self._shaped.sent.tokens
            self._learners.metrics.streams_continued.of[(self._link.name,)].inc()
            return  # the client had its first token from another backend
        record.first_token(now)
        self._learners.metrics.first_token(record, now)

    def unexpected(self, fields: dict[str, Any] | None) -> None:
        """Learn nothing from a response of another kind than was asked for, but charge for it."""
        self._learns = False
        self._learners.metrics.upstream_error(self._link.name, "content_type")
        self._learners.backends.faults.came(self._link.name, "content_type")
        usage = (fields or {}).get("usage")
        if isinstance(usage, dict):
            self.usage(usage)

    def whole_response(self, fields: dict[str, Any] | None) -> None:
        """Learn from a successful response that is no stream.

        Args:
            fields: its JSON; None if it is large, or no JSON object.
        """
        if self._shaped.parsed.request.streams:
            self._grant.first_token()  # a response of one token: its end is its first token
        self.prompt_computed()
        if fields is None:
            return
        usage, kept_id = fields.get("usage"), fields.get("id")
        if isinstance(usage, dict):
            self.usage(usage)
        if isinstance(kept_id, str):
            self.response_kept(kept_id)

    def prompt_computed(self) -> None:
        """Offer a prompt that the engine now holds for translation. The salted body counts."""
        parsed = self._shaped.parsed
        model = self._learners.backends.models.named(parsed.model)
        if model.may_be_adapter or not parsed.dialect.tokenizes:
            return  # the engine keys its blocks by more; /tokenize reads no such body
        self._learners.translator.offer(self._shaped.body, parsed, self._link)

    def usage(self, usage: dict[str, Any]) -> None:
        """Learn from the usage of a response. Implausible counts teach nothing."""
        parsed, record, learners = self._shaped.parsed, self._shaped.record, self._learners
        prompt_tokens, cached_tokens, output_tokens = parsed.dialect.usage_tokens(usage)
        if not prompt_tokens:
            return
        record.used(prompt_tokens, cached_tokens or 0, output_tokens)
        learners.metrics.used(self._link.name, prompt_tokens, record.cached_tokens)
        if not self._learns:
            return
        self._grant.report_usage(output_tokens, cached_tokens, prompt_tokens)
        learners.estimate.learn(parsed.prompt_bytes, prompt_tokens, record.tenant)

    def no_usage(self, events: int) -> None:
        self._grant.report_events(events)

    def response_kept(self, response_id: str) -> None:
        """Note where a response is kept, for requests that go on from it."""
        parsed, record = self._shaped.parsed, self._shaped.record
        if parsed.dialect.keeps_responses:
            tokens = record.prompt_tokens + record.output_tokens
            self._learners.kept.add(
                record.tenant, response_id, parsed.request, self._link.name, tokens
            )

    def cut(self, limit: str) -> None:
        learners = self._learners
        note_cut(self._shaped.record, learners.metrics, learners.backends, self._link, limit)


def note_cut(
    record: RequestRecord, metrics: ProxyMetrics, backends: Backends, link: BackendLink, limit: str
) -> None:
    """Count a response that ended too early, and probe the backend, which may have died.

    Args:
        limit: a sentence about the limit of this proxy that ended it, "" if the backend did.
    """
    record.reason = CUT
    metrics.upstream_error(link.name, "own_limit" if limit else "mid_stream")
    backends.faults.limited(link.name, limit)
    link.poke.set()
