"""Write a run in the formats of other tools: `forebay runs export FORMAT RUN`.

An exporter is a function `export(run: Path, out: BinaryIO, tag: str)`: `run` is a run folder and
`tag` a tag of its latency.hlog, which most formats do not need. Other packages add theirs under the
entry point group `forebay.exporters`, under the name of the format.
"""

import io
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.otlp import export_otlp
from forebay.analysis.runs.run import RunData
from forebay.traces.ground.errors import InputError

GROUP = "forebay.exporters"
US_IN_MS = 1_000.0
Exporter = Callable[[Path, BinaryIO, str], None]


def exporters() -> dict[str, Exporter]:
    """Return the exporters by name, our own and the exporters of installed packages."""
    by_name: dict[str, Exporter] = {
        "csv": export_csv,
        "hgrm": export_hgrm,
        "vllm-bench": export_vllm_bench,
        "otlp": export_otlp,
    }
    for point in entry_points(group=GROUP):
        if point.name in by_name:
            raise InputError(
                f"{point.value}: registers the exporter {point.name!r}, which exists; uninstall "
                "the package that brings it"
            )
        by_name[point.name] = _late(point)
    return by_name


def _late(point: Any) -> Exporter:
    """Import an exporter when it is used, so that a broken package harms no other format."""

    def export(run: Path, out: BinaryIO, tag: str) -> None:
        try:
            loaded: Exporter = point.load()
        except (ImportError, AttributeError) as error:
            raise InputError(f"exporter {point.name}: cannot be loaded ({error})") from error
        loaded(run, out, tag)

    return export


def export_csv(run: Path, out: BinaryIO, tag: str) -> None:
    """Write one line a request, with the columns of requests.parquet."""
    import pyarrow.csv
    import pyarrow.parquet

    load_run(run)  # raises if the folder is damaged
    pyarrow.csv.write_csv(pyarrow.parquet.read_table(run / "requests.parquet"), out)


def export_hgrm(run: Path, out: BinaryIO, tag: str) -> None:
    """Write the percentile distribution of a metric in milliseconds, as HdrHistogram plots read it.

    A tag without a bucket, such as `ttft_response`, adds up all buckets.
    """
    from forebay.traces.ground.hlog import add_into, new_histogram, read_hlog

    load_run(run)
    logs = read_hlog(run / "latency.hlog")
    tags = [name for name in logs if name == tag or name.partition(".")[0] == tag]
    if not tags:
        names = ", ".join(sorted(logs)) or "none"
        raise InputError(f"--tag {tag}: not in {run}; there are {names}")
    total = new_histogram()
    for name in tags:
        for interval in logs[name]:
            add_into(total, interval.histogram)
    text = io.BytesIO()
    total.output_percentile_distribution(text, US_IN_MS)
    rows = text.getvalue().decode().partition("#[")[0]
    out.write(f"{rows}{_footer(total)}".encode())


def _footer(total: Any) -> str:
    """Return the last lines as Java prints them. The library mixes units and names the count so
    that hdr-plot cannot read it."""
    mean, deviation = total.get_mean_value() / US_IN_MS, total.get_stddev() / US_IN_MS
    return (
        f"#[Mean    = {mean:12.3f}, StdDeviation   = {deviation:12.3f}]\n"
        f"#[Max     = {total.max_value / US_IN_MS:12.3f}, "
        f"Total count    = {total.total_count:12d}]\n"
        f"#[Buckets = {total.bucket_count:12d}, SubBuckets     = {total.sub_bucket_count:12d}]\n"
    )


def export_vllm_bench(run: Path, out: BinaryIO, tag: str) -> None:
    """Write the JSON of `vllm bench serve --save-result --save-detailed`.

    Times are from when a request was sent, as that tool counts them. `queue_times` has the seconds
    that this was later than due. Single gaps between tokens are not kept in a run, so `itls`
    repeats each request's mean.
    """
    data = load_run(run)
    out.write(orjson.dumps(vllm_bench_result(data), option=orjson.OPT_INDENT_2))


def vllm_bench_result(run: RunData) -> dict[str, Any]:
    numbers = run.numbers
    ok = run.words["outcome"] == "ok"
    # The tool's times start when a request is sent, ours when it is due.
    lag_s = np.nan_to_num(numbers["sent_s"] - numbers["intended_s"])
    ttft_s = np.where(ok, np.nan_to_num(numbers["ttft_service_s"]), 0.0)
    e2e_s = np.where(ok, np.nan_to_num(numbers["e2e_response_s"] - lag_s), 0.0)
    tpot_s = numbers["tpot_s"]
    output = np.where(ok, np.nan_to_num(numbers["output_tokens"]), 0).astype(int)
    duration_s = run.number("duration_s") or 0.0
    totals = {"input": int(numbers["input_tokens"][ok].sum()), "output": int(output.sum())}
    percentiles: dict[str, float] = {}
    for name, values in (("ttft", ttft_s[ok]), ("tpot", tpot_s[ok]), ("e2el", e2e_s[ok])):
        finite = values[~np.isnan(values)] * 1e3
        if len(finite):
            percentiles |= {
                f"mean_{name}_ms": float(finite.mean()),
                f"median_{name}_ms": float(np.median(finite)),
                f"std_{name}_ms": float(finite.std()),
                f"p99_{name}_ms": float(np.percentile(finite, 99)),
            }
    # A run keeps no single gaps, so each is the mean of its request.
    gaps = [
        [] if np.isnan(mean_s) else [float(mean_s)] * max(0, count - 1)
        for mean_s, count in zip(tpot_s, output.tolist(), strict=True)
    ]
    return {
        "date": _date(run.info),
        "backend": "forebay",
        "model_id": run.info.get("model"),
        "num_prompts": run.requests,
        "request_rate": run.info.get("rate_per_s") or run.number("offered_rate_per_s"),
        "max_concurrency": None,
        "duration": duration_s,
        "completed": int(ok.sum()),
        "failed": int((~ok).sum()),
        "total_input_tokens": totals["input"],
        "total_output_tokens": totals["output"],
        "request_throughput": _rate(float(ok.sum()), duration_s),
        "request_goodput": run.number("goodput_per_s"),
        "output_throughput": _rate(totals["output"], duration_s),
        "total_token_throughput": _rate(sum(totals.values()), duration_s),
        "input_lens": np.nan_to_num(numbers["input_tokens"]).astype(int).tolist(),
        "output_lens": output.tolist(),
        "ttfts": ttft_s.tolist(),
        "itls": gaps,
        "latencies": e2e_s.tolist(),
        "start_times": np.nan_to_num(numbers["sent_s"]).tolist(),
        "queue_times": lag_s.tolist(),
        "generated_texts": [""] * run.requests,
        "errors": [
            "" if good else str(reason or "failed")
            for good, reason in zip(ok, run.words["reason"], strict=True)
        ],
        **percentiles,
    }


def _date(info: Mapping[str, Any]) -> str | None:
    started = info.get("started_at")
    try:
        return datetime.fromisoformat(started).strftime("%Y%m%d-%H%M%S") if started else None
    except (TypeError, ValueError):
        return None


def _rate(count: float, duration_s: float) -> float | None:
    return count / duration_s if duration_s else None
