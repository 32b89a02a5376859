"""Our counters show the same as those of prometheus_client."""

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from forebay.proxy.telemetry.metrics.counters import BucketHistogram, Counter

EDGES = (0.001, 0.25, 1.0, 4.0, 1e6)


@given(
    amounts=st.lists(
        st.tuples(
            st.sampled_from(["a", 'b"\n']),
            st.sampled_from([0.0, *EDGES]) | st.floats(0.0, 1e9),
        ),
        max_size=20,
    )
)
def test_the_text_is_that_of_prometheus_client(amounts: list[tuple[str, float]]) -> None:
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    pairs = [
        (
            Counter("x_answers", "Some text", ("one", "two"), registry=ours),
            prometheus_client.Counter("x_answers", "Some text", ("one", "two"), registry=theirs),
        ),
        (
            Counter("x_alone", "Alone", registry=ours),
            prometheus_client.Counter("x_alone", "Alone", registry=theirs),
        ),
    ]
    histograms = [
        (
            BucketHistogram("x_seconds", "Seconds", ("one",), buckets=EDGES, registry=ours),
            prometheus_client.Histogram(
                "x_seconds", "Seconds", ("one",), buckets=EDGES, registry=theirs
            ),
        ),
        (
            BucketHistogram("x_lag", "Lag", buckets=EDGES, registry=ours),
            prometheus_client.Histogram("x_lag", "Lag", buckets=EDGES, registry=theirs),
        ),
    ]
    for label, amount in amounts:
        pairs[0][0].of[label, "z"].inc(amount)
        pairs[0][1].labels(label, "z").inc(amount)
        for counter in pairs[1]:
            counter.inc(amount)
        histograms[0][0].of[(label,)].observe(amount)
        histograms[0][1].labels(label).observe(amount)
        for histogram in histograms[1]:
            histogram.observe(amount)
    assert generate_latest(ours) == generate_latest(theirs)
