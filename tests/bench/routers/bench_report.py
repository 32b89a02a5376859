"""The output of `bench_proxy.py`: the table, Forebay beside each peer, and its validity."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

Figures = dict[str, float]
COLUMNS = {
    "reference_ms": ("reference loop, ms", "{:.0f}"),
    "others_cores": ("cores taken by others", "{:.2f}"),
    "added_ms": ("small: added p50, ms", "{:.2f}"),
    "cpu_small_ms": ("CPU, ms", "{:.3f}"),
    "cpu_64_ms": ("64 at once: CPU, ms", "{:.3f}"),
    "rate_64": ("requests/s", "{:.0f}"),
    "document_ms": ("400 KB: added p50, ms", "{:.2f}"),
    "cpu_document_ms": ("CPU, ms", "{:.2f}"),
    "cpu_1k_tokens_s": ("CPU-s per 1,000 tokens", "{:.4f}"),
    "chat_p99_ms": ("small at 50/s: p99, ms", "{:.1f}"),
    "chat_20_p99_ms": ("beside 20 x 400 KB/s", "{:.1f}"),
    "chat_60_p99_ms": ("beside 60 x 400 KB/s", "{:.1f}"),
    "chat_8mb_p99_ms": ("beside 2 x 8 MB/s", "{:.1f}"),
    "lag_8mb_p99_ms": ("loop lag p99 there, at most ms", "{:g}"),
    "rss_mib": ("RSS, MiB: start", "{:.0f}"),
    "rss_streams_mib": ("1,000 streams", "{:.0f}"),
    "rss_documents_mib": ("after unique 400 KB prompts", "{:.0f}"),
    "documents": ("how many of them", "{:.0f}"),
    "seconds": ("took, s", "{:.0f}"),
}
MOST_OTHERS = 0.15  # of a core: beyond, wall-clock figures are about them too


@dataclass(frozen=True, slots=True)
class Target:
    """A limit on quiet hardware, and what peers took there (medians of three passes)."""

    title: str
    most: float
    peers: dict[str, float]

    def allowed(self, peer: str) -> float | None:
        """The target as a multiple of this peer's figure; None if that figure is not known."""
        known = self.peers.get(peer)
        return self.most / known if known else None


TARGETS = {
    "added_ms": Target(
        "small request: added p50, ms", 0.3,
        {"nginx": 0.10, "haproxy": 0.066, "envoy": 0.105, "smg": 0.137, "vllm-router": 0.46},
    ),
    "cpu_small_ms": Target(
        "small request: CPU, ms", 0.25,
        {"bare aiohttp": 0.020, "nginx": 0.032, "haproxy": 0.026, "envoy": 0.052, "smg": 0.116,
         "vllm-router": 0.161, "litellm": 6.4},
    ),
    # What "4,000 requests a second on a core" means: a core that is never idle.
    "cpu_64_ms": Target(
        "64 at once: CPU, ms", 0.25,
        {"nginx": 0.010, "haproxy": 0.0137, "envoy": 0.026, "smg": 0.071, "vllm-router": 0.072,
         "litellm": 7.2},
    ),
    "cpu_document_ms": Target(
        "400 KB prompt: CPU, ms", 1.0,
        {"nginx": 0.09, "haproxy": 0.09, "envoy": 0.09, "smg": 0.91, "vllm-router": 1.27,
         "litellm": 7.3},
    ),
    "cpu_1k_tokens_s": Target(
        "1,000 tokens: CPU-s", 0.016,
        {"nginx": 0.011, "haproxy": 0.010, "envoy": 0.012, "smg": 0.012, "vllm-router": 0.011,
         "litellm": 0.44},
    ),
}  # fmt: skip


def table(results: dict[str, list[Figures]]) -> str:
    lines = ["| router | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("| --- " * (len(COLUMNS) + 1) + "|")
    for name, runs in results.items():
        cells = [name]
        for column, (_, form) in COLUMNS.items():
            values = sorted(run[column] for run in runs if column in run)
            if not values:
                cells.append("-")
                continue
            least, most = form.format(values[0]), form.format(values[-1])
            middle = form.format(median(values))
            cells.append(middle if least == most else f"{middle} ({least}-{most})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ratios(results: dict[str, list[Figures]]) -> str:
    """Forebay over each peer in this run, beside what the target over the peer's figure allows.

    That can be judged on any machine: the targets are absolute, and hardware is not.
    """
    if "forebay" not in results:
        return ""
    titles = ["Forebay over peer, in this run (allowed)", *(t.title for t in TARGETS.values())]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for name in results:
        if name == "forebay":
            continue
        cells = [name]
        for column, target in TARGETS.items():
            allowed, theirs = target.allowed(name), middle(results[name], column)
            if allowed is None or theirs <= 0.0:
                cells.append("-")
                continue
            ratio = middle(results["forebay"], column) / theirs
            verdict = "" if ratio <= allowed else " **over**"
            cells.append(f"{ratio:.2f} ({allowed:.2f}){verdict}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def middle(runs: list[Figures], column: str) -> float:
    return median(run[column] for run in runs if column in run)


def validity(results: dict[str, list[Figures]]) -> str:
    """State whether the machine was quiet and equally fast for all runs."""
    runs = [run for each in results.values() for run in each]
    if not runs:
        return "nothing was measured"
    speeds = [run["reference_ms"] for run in runs]
    others = max(run["others_cores"] for run in runs)
    doubts = []
    if others > MOST_OTHERS:
        doubts.append(f"others took up to {others:.2f} cores: wall-clock figures are theirs too")
    if max(speeds) > 1.25 * min(speeds):
        doubts.append(
            f"the machine's speed changed between routers ({min(speeds):.0f} to "
            f"{max(speeds):.0f} ms for the reference loop): trust no ratio closer than that"
        )
    return "DOUBTFUL: " + "; ".join(doubts) if doubts else "valid: a quiet machine of one speed"


def load(path: Path) -> dict[str, list[Figures]]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    assert isinstance(found, dict)
    return found


def store(path: Path, results: dict[str, list[Figures]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1), encoding="utf-8")
