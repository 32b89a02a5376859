"""The metrics that a proxy exports."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from forebay.proxy.core.explain.receipt import Receipts
from forebay.proxy.core.health import Health
from forebay.proxy.core.model import BackendSpec, Bucket
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.telemetry.metrics.backend_metrics import BackendMetrics
from forebay.proxy.telemetry.metrics.decision_metrics import DecisionMetrics
from forebay.proxy.telemetry.metrics.proxy_metrics import ProxyMetrics
from forebay.proxy.telemetry.metrics.scaling_metrics import ScalingMetrics


def exported_metrics() -> list[Metric]:
    """Return every metric of a proxy with one backend, in the order of /metrics."""
    shaper = Shaper([BackendSpec("b0", 1)], [Bucket("chat", 9)])
    metrics = ProxyMetrics(shaper)
    metrics.registry.register(DecisionMetrics(shaper, Receipts(1), lambda: 0.0))
    metrics.registry.register(BackendMetrics(shaper, Health(["b0"]), Receipts(1)))
    metrics.registry.register(ScalingMetrics(shaper, lambda: 0.0))
    return list(text_string_to_metric_families(metrics.text().decode()))
