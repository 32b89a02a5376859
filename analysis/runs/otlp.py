"""Send the figures of a run to an OpenTelemetry collector, by its own library.

OTEL_EXPORTER_OTLP_ENDPOINT, a variable of the library, names the collector.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from forebay.analysis.runs.load import load_run
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.redaction import without_user_info

TIMEOUT_S = 10


def export_otlp(run: Path, out: BinaryIO, tag: str) -> None:
    """Send a gauge for each figure by OTLP over HTTP. `figure` is a bucket and a percentile."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
        from opentelemetry.sdk.resources import Resource
    except ImportError:
        raise InputError("OpenTelemetry is not installed; pip install 'forebay[otel]'") from None
    # One gauge for each figure's name. Its labels hold the bucket and percentile.
    data = load_run(run)
    reader = InMemoryMetricReader()
    about = {"service.name": "forebay replay", "forebay.run_id": str(data.info.get("run_id"))}
    provider = MeterProvider([reader], Resource.create(about), shutdown_on_exit=False)
    meter = provider.get_meter("forebay")
    gauges: dict[str, Any] = {}
    for (name, *rest), value in figures(data.summary):
        if name not in gauges:
            gauges[name] = meter.create_gauge(f"forebay.run.{name}")
        gauges[name].set(value, {"run": run.name, "figure": ".".join(rest)})
    exporter = OTLPMetricExporter(timeout=TIMEOUT_S)
    metrics = reader.get_metrics_data()
    sent = None if metrics is None else exporter.export(metrics, timeout_millis=TIMEOUT_S * 1e3)
    provider.shutdown()
    exporter.shutdown()
    # The destination is the library's, without the password that a URL may hold.
    where = without_user_info(
        os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
        or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    )
    if sent is not MetricExportResult.SUCCESS:
        raise InputError(f"OTLP: {where} took no metrics; set OTEL_EXPORTER_OTLP_ENDPOINT")
    out.write(f"{where} {len(gauges)} metrics\n".encode())


def figures(
    summary: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield each number of `summary.json` with the keys that lead to it."""
    for key, value in summary.items():
        place = (*path, key)
        if isinstance(value, Mapping):
            yield from figures(value, place)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield place, float(value)
