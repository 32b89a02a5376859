"""Make a run of the histograms of a file, so that reports and comparisons show them.

A histogram knows how many samples had which value, and not which request they belong to. So the
columns of such a run are right each on its own: their percentiles are exact, and a sum or a target
over two columns of one row means nothing. Requests stand in the middle of their interval.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.analysis.runs.run import NUMBERS, WORDS, RunData, folder_name
from forebay.analysis.runs.sources.hdr_payload import Counted
from forebay.analysis.runs.sources.hlog import UNITS_S, HistogramLog, Interval, read_log
from forebay.analysis.runs.sources.rows import NO_VERDICT, FileOrigin, origin_info
from forebay.analysis.statistics.quantiles import Floats, percentile_table
from forebay.traces.formats.totals import HGRM
from forebay.traces.ground.errors import InputError, reading

COLUMNS = {
    "ttft_response": "ttft_response_s",
    "ttft_service": "ttft_service_s",
    "ttft": "ttft_response_s",  # the proxy's own log
    "e2e_response": "e2e_response_s",
    "tpot": "tpot_s",
    "stall": "stall_s",
    "queue_wait": "queue_ms",
    "reject": "reject_latency_s",
}
TOKENS = {"itl": "itl_ms", "icl": "icl_ms"}  # gaps between tokens
LEFT_OUT = ("e2e_service", "sched_lag")
OTHER = "e2e_response_s"  # where a quantity of another program stands
UNTAGGED = "untagged"
NANO = 1_000_000  # values of an .hgrm are kept as millionths of its unit
DISTRIBUTION = "percentile distribution"
MOST_SAMPLES = 20_000_000
NOT_JOINT = "each percentile is exact, but which values belong to one request is not known"


def load_histograms(path: Path, name: str | None, unit: str | None) -> RunData:
    """Read an .hlog or an .hgrm as a run. Raises InputError."""
    with reading(path):
        text = path.read_text("utf-8", "replace")
    # The columns of a percentile distribution stand in one of its first lines.
    header = next(filter(None, map(HGRM.match, text[:4096].splitlines())), None)
    if header is not None:
        return _load_hgrm(path, name, text, unit, header["unit"])
    log = read_log(path, text, unit)
    notes = [log.stated, NOT_JOINT]
    notes += log.notes
    if foreign := sorted(
        {interval.tag or UNTAGGED for interval in log.intervals if _place(interval.tag)[2]}
    ):
        notes.append(f"the quantity of {', '.join(foreign)} is not named: it is shown as E2E")
    return _run(path, name, "histogram log", log, notes)


def _load_hgrm(
    path: Path, name: str | None, text: str, unit: str | None, stated: str | None
) -> RunData:
    counted = _read_hgrm(path, text)
    unit_name = unit or stated or "ms"
    how = "as such files usually are; --unit says otherwise"
    how = "--unit" if unit else "as the file says" if stated else how
    interval = Interval(0.0, 0.0, 0.0, "", counted)  # it has no time, so no rate either
    log = HistogramLog([interval], None, unit_name, "", ())
    notes = [
        f"values are {unit_name} ({how})",
        "the file does not name its quantity: it is shown as E2E",
    ]
    return _run(path, name, DISTRIBUTION, log, notes, UNITS_S[unit_name] / NANO)


def _read_hgrm(path: Path, text: str) -> Counted:
    """Return the values, in millionths of the file's unit, and the number of samples of each.

    Raises:
        InputError: it holds no rows.
    """
    values, totals = [], []
    begun = False
    for number, line in enumerate(text.splitlines(), 1):
        if HGRM.match(line):
            begun = True
            continue
        fields = line.replace(",", " ").split()
        if not begun or not fields or fields[0].startswith("#"):
            continue
        try:
            value, total = float(fields[0]), int(fields[2])
        except (ValueError, IndexError) as error:
            raise InputError(f"{path}:{number}: no value, percentile and count") from error
        values.append(round(value * NANO))
        totals.append(total)
    cumulative = np.array([0, *totals], dtype=np.int64)
    counts = cumulative[1:] - cumulative[:-1]
    if not len(counts) or counts.sum() <= 0 or (counts < 0).any():
        raise InputError(f"{path}: its percentile distribution has no samples")
    used = counts > 0
    return Counted(np.array(values, dtype=np.int64)[used], counts[used], 2)


def _run(
    path: Path,
    name: str | None,
    made_by: str,
    log: HistogramLog,
    notes: Sequence[str],
    scale_s: float | None = None,
) -> RunData:
    scale_s = scale_s or UNITS_S[log.unit]
    if (
        sum(interval.counted.total for interval in log.intervals if _place(interval.tag)[0])
        > MOST_SAMPLES
    ):
        raise InputError(f"{path}: has more than {MOST_SAMPLES:,} samples; cut it into parts")
    # Gaps between tokens have no row of their own, so they go into the summary.
    groups: dict[tuple[float, float, str], dict[str, list[Floats]]] = {}
    tokens: dict[str, dict[str, list[Floats]]] = {}
    for interval in log.intervals:
        column, bucket, _ = _place(interval.tag)
        samples = _samples(interval, scale_s)
        metric = interval.tag.partition(".")[0]
        if metric in TOKENS:
            for of in (bucket, "all"):
                tokens.setdefault(TOKENS[metric], {}).setdefault(of, []).append(samples)
        elif column:
            group = groups.setdefault((interval.start_s, interval.length_s, bucket), {})
            group.setdefault(column, []).append(samples)
    # Each sample of an interval becomes a row of the run.
    numbers, words = _columns(groups)
    summary = _summary(log, numbers, words) | {
        key: {of: _distribution(parts) for of, parts in by.items()} for key, by in tokens.items()
    }
    summary["warnings"] = [f"{made_by}: {note}" for note in notes]
    info = origin_info(
        FileOrigin(made_by, unix=log.start_unix_s is not None), log.start_unix_s or 0.0
    )
    info["joint"] = False  # columns of one row are of different requests
    info["timed"] = made_by != DISTRIBUTION
    return RunData(path, name or folder_name(path), summary, info, numbers, words)


def _place(tag: str) -> tuple[str, str, bool]:
    """Return a tag's column ("" without one), its bucket, and True if its quantity is unknown."""
    metric, _, bucket = tag.partition(".")
    if metric in COLUMNS:
        return COLUMNS[metric], bucket or "other", False
    if metric in TOKENS or metric in LEFT_OUT:
        return "", bucket or "other", False
    return OTHER, tag or UNTAGGED, True


def _samples(interval: Interval, scale_s: float) -> Floats:
    """Return every sample in seconds, none above the printed maximum."""
    values = interval.counted.values.astype(np.float64)
    if interval.largest > 0 and len(values):
        ratio = 10.0 ** np.round(np.log10(max(values[-1] / interval.largest, 1.0)))
        printed = interval.largest * ratio
        if abs(values[-1] - printed) <= 0.02 * values[-1]:
            values = np.minimum(values, printed)
    return np.repeat(values * scale_s, interval.counted.counts)


def _columns(
    groups: Mapping[tuple[float, float, str], Mapping[str, Sequence[Floats]]],
) -> tuple[dict[str, Floats], dict[str, Any]]:
    """Put the samples of each interval and bucket into rows: answered ones, then rejected ones."""
    parts: dict[str, list[Floats]] = {key: [] for key in NUMBERS}
    names: dict[str, list[Any]] = {key: [] for key in WORDS}
    for (start_s, length_s, bucket), columns in sorted(groups.items(), key=lambda item: item[0]):
        joined = {key: np.concatenate(samples) for key, samples in columns.items()}
        rejected = joined.pop("reject_latency_s", np.zeros(0))
        for outcome, own in (("ok", joined), ("rejected", {"reject_latency_s": rejected})):
            count = max((len(samples) for samples in own.values()), default=0)
            due = start_s + length_s * (np.arange(count) + 0.5) / max(1, count)
            row = {**own, "intended_s": due, "sent_s": due}
            for key in NUMBERS:
                values = np.full(count, np.nan)
                samples = row.get(key, np.zeros(0))
                values[: len(samples)] = samples * 1e3 if key == "queue_ms" else samples
                parts[key].append(values)
            for key, word in (("bucket", bucket), ("outcome", outcome)):
                names[key] += [word] * count
    numbers = {key: np.concatenate(of) if of else np.zeros(0) for key, of in parts.items()}
    total = len(names["outcome"])
    words = {key: np.array(of or [""] * total, dtype=object) for key, of in names.items()}
    return numbers, words


def _distribution(parts: Sequence[Floats]) -> dict[str, float | int | None]:
    percentiles = percentile_table(np.concatenate(parts), min_beyond=0)
    values = {
        key: None if value is None else value * 1e3 for key, value in percentiles.values.items()
    }
    longest = None if percentiles.max is None else percentiles.max * 1e3
    return {"count": percentiles.count, **values, "max": longest}


def _summary(log: HistogramLog, numbers: dict[str, Floats], words: Any) -> dict[str, Any]:
    ends = max(interval.start_s + interval.length_s for interval in log.intervals)
    begins = min(interval.start_s for interval in log.intervals)
    buckets, counts = np.unique(words["bucket"].astype(str), return_counts=True)
    return {
        "verdict": "unknown",
        "verdict_reason": NO_VERDICT,
        "requests": len(words["outcome"]),
        "window_s": ends - begins,
        "duration_s": ends - begins,
        "requests_by_bucket": dict(zip(buckets.tolist(), counts.tolist(), strict=True)),
        "slos": [],
    }
