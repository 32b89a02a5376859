"""Hold the answers of a running proxy, as `forebay doctor` reads them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forebay.traces.ground.command_line.messages import all_printable


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One line of /metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Scene:
    """The answers of the admin port.

    Attributes:
        status: `/status`, which holds a status for each worker if there are workers.
        facts: `/backends`: the answers of each backend about itself.
        samples: `/metrics`.
        before: `/status` of a moment before `facts`, or None if it is the same.
        then: `/metrics` at the start of the window. Empty if the window is the proxy's whole life.
        outcomes: how the remembered requests of the window ended, of `/requests`.
        life: the metrics since the start of the proxy, if `samples` are of a window.
    """

    status: dict[str, Any]
    facts: list[dict[str, Any]]
    samples: list[MetricSample] = field(default_factory=list)
    before: dict[str, Any] | None = None
    then: list[MetricSample] = field(default_factory=list)
    life: list[MetricSample] = field(default_factory=list)
    outcomes: Mapping[str, Any] = field(default_factory=dict)
    _indexes: dict[str, "_Index"] = field(default_factory=dict, repr=False, compare=False)

    def recent(self) -> "Scene":
        """Return the scene with counters as they grew within the window."""
        grown = between(self.then, self.samples)
        return replace(self, samples=grown, then=[], life=self.samples, _indexes={})

    def statuses(self) -> list[dict[str, Any]]:
        """Return the status of each process that answers."""
        return statuses_of(self.status)

    def backends(self) -> dict[str, dict[str, Any]]:
        """Return each backend as seen by the process that has learned most about it."""
        backends: dict[str, dict[str, Any]] = {}
        for backend in (b for status in self.statuses() for b in status["backends"]):
            before = backends.get(backend["name"])
            if before is None or _learned(backend) > _learned(before):
                backends[backend["name"]] = backend
        return backends

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric that have these labels."""
        return sum(sample.value for sample in self.matching(name, labels))

    def lifetime(self, name: str, **labels: str) -> float:
        """Return the same sum since the start of the proxy."""
        samples = self._index("life" if self.life else "samples").matching(name, labels)
        return sum(sample.value for sample in samples)

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the same sum for each value of `label`, only above 0, the largest first."""
        sums: dict[str, float] = {}
        for sample in self.matching(name, labels):
            key = sample.labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + sample.value
        return dict(sorted(((k, v) for k, v in sums.items() if v > 0), key=lambda pair: -pair[1]))

    def matching(self, name: str, labels: Mapping[str, str]) -> Iterable[MetricSample]:
        return self._index("samples").matching(name, labels)

    def _index(self, samples: str) -> "_Index":
        if samples not in self._indexes:
            self._indexes[samples] = _Index(getattr(self, samples))
        return self._indexes[samples]

    def requests(self, backend: str) -> float:
        """Return the number of requests that were last sent to this backend."""
        return self.total("forebay_backend_requests_total", backend=backend)

    def sent_now(self, backend: str) -> int:
        """Return the requests of all proxies that run there, the larger number of two moments."""
        return max(_running(self.status, backend), _running(self.before or self.status, backend))


class _Index:
    """Samples by their names and backends: checks ask for each of hundreds of backends."""

    __slots__ = ("_of_backend", "_of_name")

    def __init__(self, samples: Iterable[MetricSample]) -> None:
        self._of_name: dict[str, list[MetricSample]] = {}
        self._of_backend: dict[tuple[str, str | None], list[MetricSample]] = {}
        for sample in samples:
            key = sample.name, sample.labels.get("backend")
            self._of_name.setdefault(sample.name, []).append(sample)
            self._of_backend.setdefault(key, []).append(sample)

    def matching(self, name: str, labels: Mapping[str, str]) -> Iterable[MetricSample]:
        """Return the samples of a metric that have these labels."""
        if "backend" in labels:
            samples = self._of_backend.get((name, labels["backend"]), [])
        else:
            samples = self._of_name.get(name, [])
        return (sample for sample in samples if labels.items() <= sample.labels.items())


def statuses_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the status of a single process, or of each worker that answers."""
    if "workers" not in status:
        return [status]
    return [worker["status"] for worker in status["workers"] if worker["status"]]


def between(then: Sequence[MetricSample], now: Sequence[MetricSample]) -> list[MetricSample]:
    """Return the samples of `now`, with the growth of counters since `then`.

    A counter that has become smaller was reset to 0 by a restart.
    """
    before = {_key(sample): sample.value for sample in then if _counts(sample.name)}
    grown = []
    for sample in now:
        value = sample.value
        if _counts(sample.name):
            earlier = before.get(_key(sample), 0.0)
            value -= earlier if earlier <= value else 0.0
        grown.append(MetricSample(sample.name, sample.labels, value))
    return grown


def _counts(name: str) -> bool:
    return name.endswith(("_total", "_sum", "_count", "_bucket"))


def _key(sample: MetricSample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())


def _running(status: dict[str, Any], name: str) -> int:
    """Sum over workers. Requests of other proxies are counted once."""
    mine = [b for status_ in statuses_of(status) for b in status_["backends"] if b["name"] == name]
    if len(mine) > 1:
        return sum(backend["in_flight"] for backend in mine)
    return sum(backend["in_flight"] + backend["in_flight_elsewhere"] for backend in mine)


def _learned(backend: dict[str, Any]) -> int:
    return int(backend["prefill_cost"]["observations"])


def samples_of(text: str) -> list[MetricSample]:
    """Parse an exposition of Prometheus metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        MetricSample(sample.name, all_printable(sample.labels), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
