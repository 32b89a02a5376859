"""Sample the /metrics pages of servers during a run, on the run's time axis.

Any page in the text format of Prometheus can be sampled: of vLLM, of the proxy's admin port, of
DCGM's exporter. Only the number of a line is read each time, because the loop that reads
pages of a thousand lines also sends the requests. `ServerGauges` are the few figures that people
look at: use and power of GPUs, use of KV caches.
"""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import orjson
from yarl import URL

from forebay.replay.clock.clock import Clock
from forebay.replay.results.arrow_file import ArrowFile
from forebay.traces.ground.errors import InputError

TIMEOUT_WALL_S = 5.0
MAX_PAGE_BYTES = 32 << 20
LEAST_GAP_WALL_S = 0.25
GROUP_ROWS = 4_000  # writing them takes about a millisecond
LONGEST_UNWRITTEN_S = 10.0  # of the run, what a killed run may lack

KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")  # the latter to vLLM 0.9
UNKNOWN = 1e9  # DCGM writes larger numbers where it knows no value
LONGEST_GAP = 10.0, 0.1
"""Seconds without a sample, or a part of the time if that is longer, beyond which a mean of the
time is unknown."""

_Problem = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


def metrics_urls(texts: Sequence[str]) -> tuple[str, ...]:
    """Read `--metrics`, where /metrics is the default path (InputError: not a URL)."""
    urls = []
    for text in texts:
        try:
            parts = urlsplit(text.strip())
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            urls.append(str(URL(text.strip()).with_path(parts.path.strip("/") or "metrics")))
        except ValueError:
            usable = False
        if not usable:
            raise InputError(
                f"--metrics: {text!r} is not a URL; write e.g. http://127.0.0.1:8000/metrics"
            )
    return tuple(dict.fromkeys(urls))


class _Gauge(NamedTuple):
    """A figure of all servers: its name, its series and their factor, and its unit.

    Watts of several devices are added up. Of shares, the mean counts.
    """

    label: str
    series: tuple[str, ...]
    factor: float
    unit: Literal["share", "w"]


GAUGES = {
    "gpu_use": _Gauge("GPU use", ("DCGM_FI_DEV_GPU_UTIL",), 0.01, "share"),
    "power_w": _Gauge("GPU power", ("DCGM_FI_DEV_POWER_USAGE",), 1.0, "w"),
    "kv_use": _Gauge("KV cache use", KV_USE, 1.0, "share"),
}
ENERGIES = {
    "energy_j_per_request": "energy of a request",
    "energy_j_per_million_tokens": "energy of a million tokens",
}
_GAUGE_OF = {series: name for name, gauge in GAUGES.items() for series in gauge.series}


class ServerGauges:
    """The samples of `GAUGES`. A GPU that several lines name by its UUID counts once."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[str, array[float]]] = {name: {} for name in GAUGES}

    def samples(self, source: str, series: str, labels: Mapping[str, str]) -> "array[float] | None":
        """Return an array for the times and values of a series in turn, None if it is no gauge."""
        devices = self._devices.get(_GAUGE_OF.get(series, ""))
        device = labels.get("UUID") or f"{source} {sorted(labels.items())}"
        return None if devices is None else devices.setdefault(device, array("d"))

    def latest(self, since_s: float) -> dict[str, float]:
        """Return the gauges that every device has reported since `since_s`."""
        gauges = {}
        for name, devices in self._devices.items():
            values = [each[-1] for each in devices.values() if each and each[-2] >= since_s]
            if values and len(values) == len(devices):
                gauges[name] = _together(name, values)
        return gauges

    def means(self, name: str, edges: Any) -> Any:
        """Return the mean of a gauge between each two of the ascending times `edges`.

        A gauge changes evenly between two samples. None if the pages lack it, or if a device has
        none for longer than `LONGEST_GAP`.
        """
        import numpy

        first_s, last_s = edges[0], edges[-1]
        longest_s = max(LONGEST_GAP[0], LONGEST_GAP[1] * (last_s - first_s))
        means = []
        for samples in self._devices[name].values():
            times, values = numpy.array(samples).reshape(-1, 2).T
            gaps = numpy.diff([first_s, *times.clip(first_s, last_s), last_s])
            if not len(times) or gaps.max() > longest_s:
                return None
            grid = numpy.union1d(times, edges)
            at_grid = numpy.interp(grid, times, values)
            areas = numpy.diff(grid) * (at_grid[1:] + at_grid[:-1]) / 2
            sums = numpy.interp(edges, grid, numpy.concatenate(([0.0], numpy.cumsum(areas))))
            means.append(numpy.diff(sums) / numpy.diff(edges))
        return _together(name, means) if means else None


def keep_sample(samples: "array[float]", at_s: float, value: float) -> None:
    """Append a sample to what `ServerGauges.samples` returned, unless it is no value."""
    if 0.0 <= value < UNKNOWN:
        samples.extend((at_s, value))


def _together(name: str, of_devices: Sequence[Any]) -> Any:
    gauge = GAUGES[name]
    return sum(of_devices) * gauge.factor / (1 if gauge.unit == "w" else len(of_devices))


def gauge_text(values: Mapping[str, float | None]) -> str:
    """Format the known gauges among `values`, "" if there are none."""
    return "   ".join(
        f"{gauge.label} {f'{value:.0%}' if gauge.unit == 'share' else f'{value:,.0f} W'}"
        for name, gauge in GAUGES.items()
        if (value := values.get(name)) is not None
    )


def server_figures(gauges: ServerGauges, summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the mean of each gauge until the last answer, and the energy of the answers.

    Joules for an answered request, and for a million of its prompt and output tokens.
    """
    seconds = summary["duration_s"]
    figures: dict[str, float | None] = {}
    for name in GAUGES:
        means = gauges.means(name, [0.0, seconds]) if seconds else None
        figures[name] = None if means is None else float(means[0])
    power_w = figures["power_w"]
    per_s = (summary["requests_per_s"], (summary["total_tokens_per_s"] or 0.0) / 1e6)
    for key, rate in zip(ENERGIES, per_s, strict=True):
        figures[key] = power_w / rate if power_w is not None and rate else None
    return figures


class MetricsTable(ArrowFile):
    """Writes a row for each sample of each series.

    Columns: `s` (seconds since the run's start), `source` (URL of the page), `name` of the series,
    `labels` (a JSON object) and `value`. The series `up` is 1, or 0 if the page could not be read.
    """

    def __init__(self, path: Path, stream: Path) -> None:
        import pyarrow

        self.gauges = ServerGauges()
        self._gauge_of: dict[int, array[float]] = {}
        self._series: dict[tuple[str, str], int] = {}
        self._texts: tuple[list[str], list[str], list[str]] = ([], [], [])
        self._times_s, self._ids, self._values = array("d"), array("i"), array("d")
        text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
        kinds = {"s": pyarrow.float64(), "source": text, "name": text, "labels": text}
        kinds["value"] = pyarrow.float64()
        schema = pyarrow.schema(
            [pyarrow.field(*column, nullable=False) for column in kinds.items()]
        )
        super().__init__(path, stream, schema, row_group_size=GROUP_ROWS)

    def add(self, at_s: float, source: str, page: str | None) -> None:
        """Add all series of a page, or `up 0` without a page.

        Raises:
            ValueError: the page is not in the text format. No series of it is added.
        """
        # Read the whole page first, so that a bad page adds nothing.
        read = []
        for line in (page or "").splitlines():
            if not line or line.startswith("#"):
                continue
            series, _, value = line.rstrip().rpartition(" ")
            at = self._series.get((source, series))
            if at is None:
                at, value = self._new_series(source, series, line)
            read.append((at, float(value)))
        up = self._series.get((source, "up"))
        if up is None:
            up = self._keep(source, "up", "up", {})
        read.append((up, float(page is not None)))
        for at, number in read:
            self._times_s.append(at_s)
            self._ids.append(at)
            self._values.append(number)
            if (samples := self._gauge_of.get(at)) is not None:
                keep_sample(samples, at_s, number)
        if len(self._ids) >= GROUP_ROWS or at_s - self._times_s[0] >= LONGEST_UNWRITTEN_S:
            self._write_samples()

    def close(self) -> None:
        if self._ids:
            self._write_samples()
        super().close()

    def _new_series(self, source: str, series: str, line: str) -> tuple[int, str]:
        """Return the number of a new series, and its value in this line."""
        from prometheus_client.parser import text_string_to_metric_families

        families = text_string_to_metric_families(f"{line}\n")
        try:
            samples = [sample for family in families for sample in family.samples]
        except IndexError as error:  # how the parser meets some damaged labels
            raise ValueError(f"{line[:80]!r} is no sample") from error
        if len(samples) != 1:
            raise ValueError(f"{line[:80]!r} is no sample")
        (sample,) = samples
        if sample.timestamp is not None:  # the line ends with it, and the value is before it
            series = f"{sample.name} {sorted(sample.labels.items())}"
        number = self._series.get((source, series))
        if number is None:
            number = self._keep(source, series, sample.name, sample.labels)
        return number, str(sample.value)

    def _keep(self, source: str, series: str, name: str, labels: dict[str, str]) -> int:
        text = orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode()
        for column, value in zip(self._texts, (source, name, text), strict=True):
            column.append(value)
        if (samples := self.gauges.samples(source, name, labels)) is not None:
            self._gauge_of[len(self._series)] = samples
        return self._series.setdefault((source, series), len(self._series))

    def _write_samples(self) -> None:
        arrow = self._arrow
        ids = arrow.array(self._ids, type=arrow.int32())
        texts = [arrow.array(each).take(ids).dictionary_encode() for each in self._texts]
        self._write([arrow.array(self._times_s), *texts, arrow.array(self._values)])
        self._times_s, self._ids, self._values = array("d"), array("i"), array("d")


class MetricsSampler:
    """Reads the pages once a second of the run, inside `async with`.

    It sends no API key, because the pages belong to other servers than the targets.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_WALL_S)
        self._session = aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())

    async def __aenter__(self) -> "MetricsSampler":
        """Read each page once (InputError: an unreadable page)."""
        for url in self._urls:
            try:
                await self._page(url)
            except _Problem as error:
                await self._session.close()
                reason = str(error) or type(error).__name__
                raise InputError(f"--metrics {url}: cannot be read ({reason})") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def every_second(self, clock: Clock, table: MetricsTable) -> None:
        """Sample until cancelled. A page that takes longer than a second skips samples."""
        every_s = max(1.0, LEAST_GAP_WALL_S * clock.scale)
        while True:
            await self.sample(clock, table)
            await clock.sleep(every_s - clock.now() % every_s)

    async def sample(self, clock: Clock, table: MetricsTable | None) -> None:
        """Read all pages at once, if there is a table. An unreadable page has `up` 0."""
        if table is not None:
            await asyncio.gather(*(self._sample(url, clock, table) for url in self._urls))

    async def _sample(self, url: str, clock: Clock, table: MetricsTable) -> None:
        try:
            page = await self._page(url)
            table.add(clock.now(), url, page)
        except _Problem:
            table.add(clock.now(), url, None)

    async def _page(self, url: str) -> str:
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"answered {response.status}")
            raw = bytearray()
            async for chunk in response.content.iter_any():
                raw += chunk
                if len(raw) > MAX_PAGE_BYTES:
                    raise ValueError(f"more than {MAX_PAGE_BYTES >> 20} MiB")
            return raw.decode()
