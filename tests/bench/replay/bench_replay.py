"""Measure what load generators cost, and how true their arrivals are, as ratios to a lean client.

Each client runs in a process of its own against `stream_server.py`, and its CPU time is that of the
process and its children. Starting up is taken out: a figure is the difference between a long and a
short run over the difference in work. Arrivals are those that the server saw. Clients take turns.

    python tests/bench/replay/bench_replay.py [--only cpu,arrivals,highest] [--out FILE.json]

Peers that are installed take part: `--peers FOLDER` has an environment for each, by its name. They
find the tokenizer `bench/words` in HF_HOME (`make_tokenizer.py` puts it there), offline. `--out`
keeps measures of earlier runs in the file that were not measured anew.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from lean_client import due_times

HERE = Path(__file__).parent
LEAN, FOREBAY = "lean", "forebay"
OURS = (LEAN, FOREBAY)
TOKENIZER = "bench/words"
OTHERS = "with others: "  # before the names of results of a run in which peers took part
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class LoadShape:
    rate: float
    count: int
    prompt_tokens: int = 16
    output_tokens: int = 8
    poisson: bool = False


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """One run: CPU seconds of the client, arrivals that the server saw, and the known schedule."""

    cpu_s: float
    arrivals_s: tuple[float, ...]
    due_s: tuple[float, ...] | None

    @property
    def rate_per_s(self) -> float:
        span = self.arrivals_s[-1] - self.arrivals_s[0]
        return (len(self.arrivals_s) - 1) / span

    def figures(self) -> dict[str, float | None]:
        gaps = [later - earlier for earlier, later in pairwise(self.arrivals_s)]
        mean = statistics.fmean(gaps)
        apart = [gap - mean for gap in gaps]
        power = sum(one * one for one in apart)
        return {
            "rate_per_s": self.rate_per_s,
            "gap_cv": statistics.pstdev(gaps) / mean,
            "gap_lag1": sum(a * b for a, b in pairwise(apart)) / power if power else None,
            "error_p50_ms": self.error_ms(0.5),
            "error_p99_ms": self.error_ms(0.99),
        }

    def error_ms(self, share: float) -> float | None:
        """Return a percentile of the distance of arrivals from their schedule, at best offset."""
        if self.due_s is None or len(self.due_s) != len(self.arrivals_s):
            return None
        errors = [at - due for at, due in zip(self.arrivals_s, self.due_s, strict=True)]
        middle = statistics.median(errors)
        apart = sorted(abs(one - middle) for one in errors)
        return apart[int(share * (len(apart) - 1))] * 1e3


class Client:
    """A load generator: how it is called, and which schedule it had."""

    def __init__(self, name: str, peers: Path | None = None) -> None:
        self.name = name
        self._bin = None if peers is None else peers / name / "bin"

    def words(self, load: LoadShape, url: str, folder: Path) -> Sequence[str]:
        made: Callable[[LoadShape, str, Path], Sequence[str]] = COMMANDS[self.name]
        first, *rest = made(load, url, folder)
        return [str(self._bin / first) if self._bin is not None else first, *rest]

    def due_s(self, load: LoadShape, folder: Path) -> tuple[float, ...] | None:
        if self.name == FOREBAY:
            from pyarrow.parquet import read_table

            table = read_table(folder / "run" / "requests.parquet", columns=["intended_s"])
            times: Any = table["intended_s"].to_pylist()
            return tuple(sorted(times))
        if self.name == LEAN or not load.poisson:
            return tuple(due_times(load.rate, load.count, load.poisson))
        return None  # drawn by the peer


def lean(load: LoadShape, url: str, folder: Path) -> Sequence[str]:
    return [sys.executable, str(HERE / "lean_client.py"), "--port", url.rpartition(":")[2],
            "--rate", str(load.rate), "--count", str(load.count), "--prompt-tokens",
            str(load.prompt_tokens), "--output-tokens", str(load.output_tokens),
            *(["--poisson"] if load.poisson else [])]  # fmt: skip


def forebay(load: LoadShape, url: str, folder: Path) -> Sequence[str]:
    """Write a trace whose prompts share a document and end in a question of their own."""
    from forebay.traces.reading.jsonl import write_trace
    from forebay.traces.schema import TraceRequest

    tokens = load.prompt_tokens + 8
    whole = load.prompt_tokens // 512

    def blocks(number: int) -> tuple[int, ...]:
        own = -(-tokens // 512) - whole
        return (*range(whole), *range(10**9 + 2 * number, 10**9 + 2 * number + own))

    rows = (
        TraceRequest(f"r{at}", at / load.rate, tokens, load.output_tokens, blocks(at))
        for at in range(load.count)
    )
    write_trace(folder / "trace.jsonl", rows)
    return [sys.executable, "-m", "forebay.proxy", "replay", str(folder / "trace.jsonl"),
            "--target", url, "--arrivals", "poisson" if load.poisson else "constant", "--rate",
            str(load.rate), "--out", str(folder / "run"), "--quiet", "--force"]  # fmt: skip


def vllm(load: LoadShape, url: str, folder: Path) -> Sequence[str]:
    return ["vllm", "bench", "serve", "--backend", "openai", "--base-url", url, "--model", "m",
            "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len",
            str(load.prompt_tokens), "--random-output-len", str(load.output_tokens),
            "--num-prompts", str(load.count), "--request-rate", str(load.rate), "--burstiness",
            "1" if load.poisson else "1e6", "--ignore-eos", "--disable-tqdm"]  # fmt: skip


def guidellm(load: LoadShape, url: str, folder: Path) -> Sequence[str]:
    sizes = f"prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    pace = "poisson" if load.poisson else "constant"
    return ["guidellm", "run", "--backend",
            f"kind=openai_http,target={url},model=m,request_format=/v1/completions", "--profile",
            f"kind={pace},rate={load.rate:g}", "--constraint",
            f"kind=max_requests,count={load.count}", "--tokenizer",
            f"kind=huggingface_auto,model={TOKENIZER}", "--data", f"kind=synthetic_text,{sizes}",
            "--output", f"kind=json,path={folder}/guidellm.json", "--disable-console"]  # fmt: skip


def aiperf(load: LoadShape, url: str, folder: Path) -> Sequence[str]:
    return ["aiperf", "profile", "--url", url, "--model", "m", "--tokenizer", TOKENIZER,
            "--endpoint-type", "completions", "--streaming", "--request-rate", str(load.rate),
            "--arrival-pattern", "poisson" if load.poisson else "constant", "--request-count",
            str(load.count), "--isl", str(load.prompt_tokens), "--osl", str(load.output_tokens),
            "--artifact-dir", str(folder / "aiperf"), "--ui", "none"]  # fmt: skip


def inference_perf(load: LoadShape, url: str, folder: Path) -> Sequence[str]:
    sizes = []
    for name, size in (("input", load.prompt_tokens), ("output", load.output_tokens)):
        values = {"min": size, "max": size, "mean": size, "std_dev": 0, "total_count": load.count}
        for key, value in values.items():
            sizes += [f"--data.{name}_distribution.{key}", str(value)]
    stage = [{"rate": load.rate, "duration": max(1, round(load.count / load.rate))}]
    return ["inference-perf", "--server.type", "vllm", "--server.base_url", url,
            "--server.model_name", "m", "--server.ignore_eos", "true",
            "--tokenizer.pretrained_model_name_or_path", TOKENIZER, "--api.type", "completion",
            "--api.streaming", "true", "--data.type", "random", *sizes, "--load.type",
            "poisson" if load.poisson else "constant", "--load.stages", json.dumps(stage),
            "--storage.local_storage.path", str(folder / "reports")]  # fmt: skip


COMMANDS = {
    LEAN: lean,
    FOREBAY: forebay,
    "vllm": vllm,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "inference-perf": inference_perf,
}


def play(client: Client, load: LoadShape) -> PlayedRun:
    """Run one client against a new server; raises SubprocessError if it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrivals = folder / "arrivals"
        server = subprocess.Popen(
            [sys.executable, str(HERE / "stream_server.py"), "--arrivals", str(arrivals)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            words = client.words(load, url, folder)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                words,
                check=True,
                timeout=TIMEOUT_S,
                env=environment(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        finally:
            server.terminate()
            server.wait(30)
        cpu_s = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
        seen = [float(line) for line in arrivals.read_text().split()]
        return PlayedRun(cpu_s, tuple(seen[-load.count :]), client.due_s(load, folder))


def environment() -> dict[str, str]:
    """Return an environment in which modules are compiled once, and nothing is downloaded."""
    own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
    own["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir(), "bench-replay-pycache"))
    return {**os.environ, **own}


def cost(client: Client, small: LoadShape, large: LoadShape, work: float) -> float:
    """Return CPU seconds for each of `work` units by which `large` is more than `small`."""
    least = play(client, small).cpu_s
    return (play(client, large).cpu_s - least) / work


def per_request(client: Client) -> float:
    return cost(client, LoadShape(200, 100), LoadShape(200, 2100), 2000)


def per_token(client: Client) -> float:
    few, many = LoadShape(20, 120, output_tokens=1), LoadShape(20, 120, output_tokens=501)
    return cost(client, few, many, 120 * 500)


def per_long_prompt(client: Client) -> float:
    if client.name in OURS:
        return cost(client, LoadShape(20, 20, 120_000, 4), LoadShape(20, 220, 120_000, 4), 200)
    return cost(client, LoadShape(5, 5, 120_000, 4), LoadShape(5, 25, 120_000, 4), 20)


def highest_rate(client: Client) -> float:
    """Return the highest of a few rates that the server saw within 1 %, in requests a second."""
    best = 0.0
    for rate in (500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 5000):
        seen = play(client, LoadShape(rate, int(2 * rate), output_tokens=2)).rate_per_s
        best = max(best, seen)
        if seen < 0.99 * rate:
            break
    return best


CPU: dict[str, Callable[[Client], float]] = {
    "request": per_request,
    "streamed token": per_token,
    "120k-token prompt": per_long_prompt,
}
RATES = (50, 200, 500, 1000, 2000, 3000)
PEER_RATES = (500,)


def measured(what: str, client: Client, measure: Callable[[], Any], kept: dict[str, Any]) -> None:
    try:
        found = measure()
    except (subprocess.SubprocessError, OSError, IndexError, ZeroDivisionError) as error:
        print(f"{what}: {client.name}: {type(error).__name__}", flush=True)
        return
    kept.setdefault(client.name, []).append(found)
    print(f"{what}: {client.name}: {found}", flush=True)


def arrivals(client: Client, load: LoadShape) -> dict[str, float | None]:
    return play(client, load).figures()


def measure_all(clients: Sequence[Client], parts: Sequence[str], rounds: int, out: Any) -> None:
    results: dict[str, dict[str, Any]] = out["results"]
    ours = [client for client in clients if client.name in OURS]
    beside = OTHERS if len(clients) > len(ours) else ""
    if "cpu" in parts:
        for name, measure in CPU.items():
            kept = results[f"{beside}cpu of a {name}"] = {}
            for number in range(rounds):
                for client in clients:
                    if client.name in OURS or number == 0:  # peers take long, and are far away
                        measured(name, client, partial(measure, client), kept)
    if "highest" in parts:
        kept = results["highest rate"] = {}
        for client in ours:
            measured("highest", client, partial(highest_rate, client), kept)
    if "arrivals" in parts:
        for poisson in (False, True):
            for rate in RATES:
                load = LoadShape(rate, int(4 * rate), poisson=poisson)
                kept = results[f"{'poisson' if poisson else 'constant'} {rate}"] = {}
                for client in clients if rate in PEER_RATES else ours:
                    measured(f"{rate}/s", client, partial(arrivals, client, load), kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="cpu,highest,arrivals")
    parser.add_argument("--peers", type=Path, help="folder with an environment for each peer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clients = [Client(name) for name in OURS]
    for name in COMMANDS:
        if name in OURS:
            continue
        if options.peers is not None and (options.peers / name / "bin" / name).exists():
            clients.append(Client(name, options.peers))
    print("clients:", ", ".join(client.name for client in clients), flush=True)
    out: dict[str, Any] = {"results": {}}
    if options.out is not None and options.out.exists():
        out = json.loads(options.out.read_text())
    out["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    out["python"], out["cpus"] = platform.python_version(), os.cpu_count()
    try:
        measure_all(clients, options.only.split(","), options.rounds, out)
    finally:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
