"""Measure what load generators cost, and how true their arrivals are, as ratios to a lean client.

Each client runs in a process of its own against `stream_server.py`, and its CPU time is that of the
process. Starting up is taken out: a figure is the difference between a long and a short run over
the difference in work. Arrivals are those that the server saw. Clients take turns in each round.

    python tests/bench/replay/bench_replay.py [--rounds 3] [--out runs/bench-replay.json]

Peers that are installed take part: put their environments' bin folders on the PATH.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LEAN, FOREBAY = "lean", "forebay"


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """One run: CPU seconds of the client, and the arrivals that the server saw."""

    cpu_s: float
    arrivals_s: tuple[float, ...]

    @property
    def rate_per_s(self) -> float:
        span = self.arrivals_s[-1] - self.arrivals_s[0] if len(self.arrivals_s) > 1 else 0.0
        return (len(self.arrivals_s) - 1) / span if span else 0.0

    def error_p99_s(self, rate: float) -> float:
        """Return the 99th percentile of arrival errors against equal gaps, best offset."""
        errors = [at - number / rate for number, at in enumerate(self.arrivals_s)]
        middle = statistics.median(errors)
        apart = sorted(abs(one - middle) for one in errors)
        return apart[int(0.99 * (len(apart) - 1))]


@dataclass(frozen=True, slots=True)
class LoadShape:
    rate: float
    count: int
    prompt_tokens: int = 16
    output_tokens: int = 8


Command = Callable[[LoadShape, int, Path], Sequence[str]]


def lean(load: LoadShape, port: int, folder: Path) -> Sequence[str]:
    return [sys.executable, str(HERE / "lean_client.py"), "--port", str(port), "--rate",
            str(load.rate), "--count", str(load.count), "--prompt-tokens", str(load.prompt_tokens),
            "--output-tokens", str(load.output_tokens)]  # fmt: skip


def forebay(load: LoadShape, port: int, folder: Path) -> Sequence[str]:
    """Write a trace whose prompts share a document and end in a question of their own."""
    from forebay.traces.jsonl import write_trace
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
            "--target", f"http://127.0.0.1:{port}", "--arrivals", "constant", "--rate",
            str(load.rate), "--out", str(folder / "run"), "--quiet", "--force"]  # fmt: skip


def vllm(load: LoadShape, port: int, folder: Path) -> Sequence[str]:
    return ["vllm", "bench", "serve", "--backend", "openai", "--base-url",
            f"http://127.0.0.1:{port}", "--model", "m", "--tokenizer", "gpt2", "--dataset-name",
            "random", "--random-input-len", str(load.prompt_tokens), "--random-output-len",
            str(load.output_tokens), "--num-prompts", str(load.count), "--request-rate",
            str(load.rate), "--ignore-eos", "--disable-tqdm"]  # fmt: skip


def guidellm(load: LoadShape, port: int, folder: Path) -> Sequence[str]:
    data = f"prompt_tokens={load.prompt_tokens},output_tokens={load.output_tokens}"
    return ["guidellm", "benchmark", "--target", f"http://127.0.0.1:{port}", "--model", "m",
            "--processor", "gpt2", "--profile", "constant", "--rate", str(load.rate),
            "--max-requests", str(load.count), "--data", data, "--output-path",
            str(folder / "guidellm.json")]  # fmt: skip


def aiperf(load: LoadShape, port: int, folder: Path) -> Sequence[str]:
    return ["aiperf", "profile", "--url", f"http://127.0.0.1:{port}", "--model", "m",
            "--tokenizer", "gpt2", "--endpoint-type", "completions", "--streaming",
            "--request-rate", str(load.rate), "--request-rate-mode", "constant",
            "--request-count", str(load.count), "--isl", str(load.prompt_tokens), "--osl",
            str(load.output_tokens), "--artifact-dir", str(folder / "aiperf")]  # fmt: skip


CLIENTS: dict[str, Command] = {LEAN: lean, FOREBAY: forebay}
PEERS: dict[str, Command] = {"vllm": vllm, "guidellm": guidellm, "aiperf": aiperf}


def play(command: Command, load: LoadShape) -> PlayedRun:
    """Run one client against a new server; raises CalledProcessError if it fails."""
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
            port = int(server.stdout.readline())
            words = command(load, port, folder)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=300)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        finally:
            server.terminate()
            server.wait(30)
        cpu_s = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
        seen = tuple(float(line) for line in arrivals.read_text().split())
        return PlayedRun(cpu_s, seen)


def cost(command: Command, small: LoadShape, large: LoadShape, work: float) -> float:
    """Return CPU seconds for each of `work` units by which `large` is more than `small`."""
    return (play(command, large).cpu_s - play(command, small).cpu_s) / work


def per_request(command: Command) -> float:
    return cost(command, LoadShape(500, 100), LoadShape(500, 3100), 3000)


def per_token(command: Command) -> float:
    few, many = LoadShape(20, 120, output_tokens=1), LoadShape(20, 120, output_tokens=501)
    return cost(command, few, many, 120 * 500)


def per_long_prompt(command: Command) -> float:
    return cost(command, LoadShape(20, 20, 120_000, 4), LoadShape(20, 220, 120_000, 4), 200)


def highest_rate(command: Command) -> float:
    """Return the highest of a few rates that the server saw within 1 %, in requests a second."""
    best = 0.0
    for rate in (500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 5000):
        seen = play(command, LoadShape(rate, int(2 * rate), output_tokens=2)).rate_per_s
        best = max(best, seen)
        if seen < 0.99 * rate:
            break
    return best


def error_at(rate: float) -> Callable[[Command], float]:
    return lambda command: play(command, LoadShape(rate, int(4 * rate))).error_p99_s(rate)


MEASURES: dict[str, tuple[Callable[[Command], float], float]] = {
    "CPU a request": (per_request, 1.2),
    "CPU a streamed token": (per_token, 1.2),
    "CPU a 120k-token prompt": (per_long_prompt, 1.3),
    "p99 schedule error at 500/s": (error_at(500), 1.2),
    "highest true rate": (highest_rate, 0.9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="comma-separated numbers of measures, from 1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = list(MEASURES)
    if options.only:
        chosen = [chosen[int(one) - 1] for one in options.only.split(",")]
    clients = CLIENTS | {name: run for name, run in PEERS.items() if shutil.which(name)}
    print("clients:", ", ".join(clients), "; not installed:",
          ", ".join(set(PEERS) - set(clients)) or "none")  # fmt: skip
    results: dict[str, dict[str, list[float]]] = {}
    for name in chosen:
        measure, goal = MEASURES[name]
        found = results[name] = {client: [] for client in clients}
        for _ in range(options.rounds):
            for client, command in clients.items():
                try:
                    found[client].append(measure(command))
                except (subprocess.SubprocessError, OSError, IndexError) as error:
                    print(f"{client}: {name}: {error}")
        lean_value = statistics.median(found[LEAN])
        print(f"{name} (goal {goal:g} of the lean client)")
        for client, values in found.items():
            if values:
                value = statistics.median(values)
                print(f"  {client:10} {value:.4g}  ratio {value / lean_value:.2f}", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        options.out.write_text(json.dumps({"at": at, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
