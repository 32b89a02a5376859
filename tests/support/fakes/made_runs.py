"""Run folders made up for tests of the analysis: seeded random numbers, nothing measured."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.replay.plan.slo import Slo

SLOS = (Slo("chat", "ttft", 2.0), Slo("document", "ttft", 15.0))
Row = dict[str, Any]

STRINGS = ("id", "bucket", "session", "tenant", "document", "outcome", "reason", "backend",
           "request_id", "task")  # fmt: skip
INTEGERS = ("input_tokens", "prompt_tokens", "cached_tokens", "output_tokens", "status")
FLOATS = ("intended_s", "sent_s", "first_s", "last_s", "done_s", "pacing_lag_s", "cap_wait_s",
          "ttft_response_s", "ttft_service_s", "e2e_response_s", "e2e_service_s", "tpot_s",
          "stall_s", "queue_ms", "retry_after_s", "reject_latency_s")  # fmt: skip
SCHEMA = pa.schema(
    [(name, pa.string()) for name in STRINGS]
    + [(name, pa.int64()) for name in INTEGERS]
    + [(name, pa.float64()) for name in FLOATS]
)


def answered(number: int, bucket: str, intended_s: float, ttft_s: float, **others: Any) -> Row:
    """A request that was answered in full."""
    prompt = 800 if bucket == "chat" else 60_000
    row: Row = {
        "id": f"r{number}",
        "bucket": bucket,
        "input_tokens": prompt,
        "prompt_tokens": prompt,
        "cached_tokens": 0,
        "output_tokens": 101,
        "intended_s": intended_s,
        "sent_s": intended_s,
        "first_s": intended_s + ttft_s,
        "last_s": intended_s + ttft_s + 1.0,
        "ttft_response_s": ttft_s,
        "ttft_service_s": ttft_s,
        "e2e_response_s": ttft_s + 1.0,
        "e2e_service_s": ttft_s + 1.0,
        "tpot_s": 0.01,
        "stall_s": 0.02,
        "queue_ms": 0.0,
        "status": 200,
        "outcome": "ok",
        "backend": "gpu0",
    }
    return row | others


def refused(number: int, bucket: str, intended_s: float, **others: Any) -> Row:
    """A request that was rejected."""
    row: Row = {
        "id": f"r{number}",
        "bucket": bucket,
        "input_tokens": 800,
        "intended_s": intended_s,
        "sent_s": intended_s,
        "status": 429,
        "outcome": "rejected",
        "reason": "queue_full",
        "retry_after_s": 3.0,
        "reject_latency_s": 0.004,
    }
    return row | others


def write_run(
    folder: Path, rows: Sequence[Row], summary: Row | None = None, info: Row | None = None
) -> Path:
    """A run folder of these requests, as `forebay replay` leaves it."""
    folder.mkdir(parents=True)
    full = [dict.fromkeys(SCHEMA.names) | row for row in rows]
    pq.write_table(pa.Table.from_pylist(full, schema=SCHEMA), folder / "requests.parquet")
    outcome: Row = {
        "requests": len(rows),
        "completed": sum(row["outcome"] == "ok" for row in rows),
        "duration_s": 200.0,
        "window_s": 180.0,
        "verdict": "valid",
        "verdict_reason": f"0 of {len(rows)} requests left more than 20 ms late",
        "verdict_at_s": None,
        "schedule_lag_ms": {"count": len(rows), "p50": 0.1, "p99": 0.6, "p99.9": None, "max": 2.0},
        "itl_ms": {"chat": {"count": 9000, "p50": 9.8, "p90": 14.0, "p99": 31.0, "max": 90.0}},
        "slos": [str(slo) for slo in SLOS],
        "ended": "complete",
    }
    (folder / "summary.json").write_bytes(orjson.dumps(outcome | (summary or {})))
    how: Row = {
        "started_at": "2026-11-21T10:00:00+00:00",
        "ended": "complete",
        "trace": {"path": "traces/rag mix.jsonl", "sha256": "ab" * 32, "rows": len(rows)},
        "seed": 7,
        "arrivals": "poisson",
        "rate_per_s": 9.5,
        "speed": None,
        "duration_s": None,
        "time_scale": 4.0,
        "targets": [{"name": "gpu0", "url": "http://127.0.0.1:8001"}],
        "model": "llama-3-8b",
        "endpoint": "completions",
        "versions": {"python": "3.11.7", "forebay": "0.1.0"},
        "platform": "Linux-6.1",
        "cpus": 2,
    }
    (folder / "run.json").write_bytes(orjson.dumps(how | (info or {})))
    return folder


def realistic_rows(kind: str, seed: int = 1, chats: int = 1600, documents: int = 160) -> list[Row]:
    """Chats and long documents on two engines, straight to them or shaped. Made up, not measured.

    Round-robin: a chat that meets a document's prefill waits for the rest of it. Shaped: few do,
    documents wait in the queue and hit the cache more often, some are rejected.
    """
    random = np.random.default_rng([seed, kind == "forebay"])
    rows: list[Row] = []
    for number, due in enumerate(np.sort(random.uniform(0, 180, chats)).tolist()):
        ttft = float(random.lognormal(math.log(0.06), 0.35))
        blocked = 0.22 if kind == "round-robin" else 0.02
        if random.random() < blocked:
            ttft += float(random.uniform(0.0, 8.0 if kind == "round-robin" else 0.9))
        tpot = float(random.lognormal(math.log(0.010), 0.1))
        stall = tpot + float(random.exponential(0.4 if kind == "round-robin" else 0.05))
        rows.append(
            answered(
                number,
                "chat",
                due,
                ttft,
                e2e_response_s=ttft + 100 * tpot,
                tpot_s=tpot,
                stall_s=stall,
                queue_ms=None if kind == "round-robin" else float(random.exponential(4.0)),
                input_tokens=int(random.integers(200, 3000)),
                cached_tokens=int(random.integers(0, 160)),
                backend=f"gpu{number % 2}",
            )
        )
    for number, due in enumerate(np.sort(random.uniform(0, 180, documents)).tolist(), chats):
        if kind == "forebay" and 90 < due < 110 and random.random() < 0.7:
            rows.append(refused(number, "document", due, input_tokens=60_000,
                                reason="deadline_unattainable", retry_after_s=12.0,
                                reject_latency_s=float(random.uniform(0.004, 0.02))))  # fmt: skip
            continue
        hit = random.random() < (0.15 if kind == "round-robin" else 0.55)
        ttft = float(random.lognormal(math.log(0.8 if hit else 5.5), 0.4))
        rows.append(
            answered(
                number,
                "document",
                due,
                ttft,
                e2e_response_s=ttft + 2.0,
                stall_s=float(random.exponential(0.5)),
                queue_ms=None if kind == "round-robin" else float(random.exponential(900.0)),
                cached_tokens=50_000 if hit else 0,
                backend=f"gpu{number % 2}",
            )
        )
    if kind == "round-robin":
        rows[5] |= {
            "outcome": "failed",
            "reason": "timeout",
            "ttft_response_s": None,
            "status": 504,
        }
    return rows


def write_pair(top: Path) -> tuple[Path, Path]:
    """Two realistic runs of the same trace, `round-robin` and `forebay`."""
    return (
        write_run(
            top / "round-robin",
            realistic_rows("round-robin"),
            {"goodput_per_s": 7.1, "attainment": 0.73},
        ),
        write_run(
            top / "forebay", realistic_rows("forebay"), {"goodput_per_s": 9.4, "attainment": 0.96}
        ),
    )
