"""Measure `forebay report` of a million requests: a run folder, and a request log of the proxy.

A run of the simulator (chats beside documents, two engines) is repeated until it has enough
requests; each repetition has ids of its own, and its times differ by 5 % at random. The peak of
memory is that of the process.

    python tests/bench/large_report.py [--requests 1000000] [--simulated 20000]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

pc: Any = pyarrow.compute  # its types know no constants beside columns
STARTED_UNIX_S = 1_790_000_000.0
LINES = 20_000  # written at once
FOREBAY = (sys.executable, "-m", "forebay.proxy")


def simulated(folder: Path, requests: int) -> Path:
    trace, run = folder / "trace.jsonl", folder / "run"
    kind = ["traces", "synth", "chat-beside-documents", "--duration", f"{requests / 4.2:.0f}s"]
    subprocess.run([*FOREBAY, *kind, "-o", str(trace), "--quiet"], check=True)
    flags = ["--gpus", "2", "--long-prefill-token-threshold", "2048", "--out", str(run), "--quiet"]
    subprocess.run([*FOREBAY, "simulate", str(trace), *flags], check=True)
    return run


def repeated(run: Path, out: Path, requests: int) -> Any:
    """Write a run folder with so many requests, and return their table."""
    table = pq.read_table(run / "requests.parquet")
    summary = json.loads((run / "summary.json").read_text())
    random = np.random.default_rng(0)
    parts = []
    for number in range(-(-requests // table.num_rows)):
        factors = pa.array(random.lognormal(0.0, 0.05, table.num_rows))
        part = table
        for at, name in enumerate(table.schema.names):
            column = table.column(name)
            if name in ("intended_s", "sent_s"):
                column = pc.add(column, summary["window_s"] * number)
            elif name.endswith("_s") and pa.types.is_floating(column.type):
                column = pc.multiply(column, factors)
            elif name in ("id", "request_id"):
                column = pc.binary_join_element_wise(str(number), column, "-")
            part = part.set_column(at, name, column)
        parts.append(part)
    table = pa.concat_tables(parts, promote_options="permissive").slice(0, requests)
    out.mkdir()
    pq.write_table(table, out / "requests.parquet", compression="zstd")
    (out / "run.json").write_bytes((run / "run.json").read_bytes())
    seconds = summary["window_s"] * requests / parts[0].num_rows
    changed = {"requests": requests, "window_s": seconds, "duration_s": seconds}
    (out / "summary.json").write_text(json.dumps(summary | changed))
    return table


def write_log(table: Any, path: Path) -> None:
    """Write the requests as the proxy logs them, one line of JSON each."""
    with path.open("wb") as file:
        for batch in table.to_batches(max_chunksize=LINES):
            file.writelines(orjson.dumps(line(row)) + b"\n" for row in batch.to_pylist())


def line(row: dict[str, Any]) -> dict[str, Any]:
    took_s = row["e2e_response_s"] or 0.002
    ended = datetime.fromtimestamp(STARTED_UNIX_S + row["intended_s"] + took_s, UTC)
    return {
        "time": ended.isoformat(timespec="milliseconds"), "level": "info", "message": "request",
        "event": "request", "request_id": row["id"], "operation": "chat",
        "status": 200 if row["outcome"] == "ok" else 429, "reason": row["reason"] or None,
        "bucket": row["bucket"], "backend": row["backend"], "tenant": "acme",
        "prompt_tokens": row["prompt_tokens"], "cached_tokens": row["cached_tokens"],
        "output_tokens": row["output_tokens"], "queue_ms": row["queue_ms"],
        "ttft_ms": None if row["ttft_response_s"] is None else 1e3 * row["ttft_response_s"],
        "duration_ms": 1e3 * took_s,
    }  # fmt: skip


def measure(path: Path, page: Path) -> str:
    began_s = time.monotonic()
    process = subprocess.Popen([*FOREBAY, "report", str(path), "-o", str(page), "--quiet"])
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began_s
    assert status == 0, status
    return (
        f"| {path.name} | {wall_s:.0f} s | {used.ru_utime + used.ru_stime:.0f} s "
        f"| {used.ru_maxrss / 1024:.0f} MiB | {page.stat().st_size / 1e6:.1f} MB |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--simulated", type=int, default=20_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = repeated(simulated(folder, given.simulated), folder / "folder", given.requests)
        write_log(table, folder / "proxy.log")
        del table
        print(f"| {given.requests:,} requests | wall | CPU | memory | page |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for file in ("folder", "proxy.log"):
            print(measure(folder / file, folder / f"{file}.html"), flush=True)


if __name__ == "__main__":
    main()
