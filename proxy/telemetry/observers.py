"""Report the start and end of each request to metrics, access log, trace and capture."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from forebay.proxy.core.explain.receipt import Receipt, Receipts
from forebay.proxy.http1.server.active_ids import ActiveIds
from forebay.proxy.telemetry.logs.access_log import AccessLog
from forebay.proxy.telemetry.logs.capture import Capture
from forebay.proxy.telemetry.logs.rejection_log import RejectionLog
from forebay.proxy.telemetry.logs.tracing import Tracer
from forebay.proxy.telemetry.logs.usage_ledger import UsageLedger
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.record import RequestRecord


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Passes the events of requests to all observers."""

    metrics: ProxyMetrics
    access: AccessLog
    tracer: Tracer | None
    capture: Capture | None
    receipts: Receipts
    ledger: UsageLedger | None
    rejections: RejectionLog
    ids: ActiveIds = field(default_factory=ActiveIds)

    def new_record(self, id_: str, now: float) -> RequestRecord:
        """Return the record of a request that has arrived. `finished` must follow."""
        return RequestRecord(id_, now, upstream_id=self.ids.take(id_))

    def started(self, record: RequestRecord, operation: str, headers: Mapping[str, str]) -> None:
        """A shaped request has arrived, with these headers."""
        record.operation = operation
        if self.capture is not None:
            self.capture.started(record)
        if self.tracer is not None:
            record.span = self.tracer.start(headers, operation)

    def receipt(self, request_id: str) -> Receipt | None:
        """Return the record of the decisions about a request, or None if it is gone."""
        return self.receipts.find(request_id)

    def finished(self, record: RequestRecord, status: int, now: float) -> None:
        """A request was answered with `status`, or its client has left (record.CLIENT_GONE)."""
        self.ids.free(record.upstream_id)
        self.metrics.finished(record, status, now)
        if record.request is not None:
            self.receipts.answered(record.request.id, status, record.reason, record.model)
        self.access.finished(record, status, now)
        self.rejections.finished(record, now)
        if self.capture is not None:
            self.capture.finished(record, status, now)
        if self.ledger is not None:
            self.ledger.finished(record, status, now)
        if record.span is not None:
            record.span.finished(record, status)
