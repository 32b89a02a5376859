"""Compare what mode observe forecasts with what mode shape does (python tests/bench/observe.py).

Virtual time, two simulated engines (Llama-3-8B, H200): the same trace is played in both modes.
"""

import argparse
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from arena_workloads import at_load
from forecasts import play
from overload import mix, poisson

from forebay.replay.engine.config import EngineConfig
from forebay.traces.schema import TraceRequest
from forebay.traces.synth.agents import AgentSessions, agent_sessions
from forebay.traces.synth.chat_beside_documents import ChatBesideDocuments, chat_beside_documents
from forebay.traces.synth.documents import Workload, workload

Rows = list[TraceRequest]


def documents(seed: int, count: int) -> Rows:
    """Half chats, half questions about popular documents of 12,000 tokens in the median."""
    spec = Workload(
        documents=100, zipf_s=1.0, chat_share=0.5, rate_per_s=3.0, duration_s=None,
        requests=count, instruction_tokens=512, seed=seed,
    )  # fmt: skip
    return list(workload(spec))


def beside(seed: int, count: int) -> Rows:
    """Chats beside documents of 120,000 tokens, each asked about five times."""
    spec = ChatBesideDocuments(duration_s=count / 4.2, seed=seed)
    return list(chat_beside_documents(spec))


def sessions(seed: int, count: int) -> Rows:
    """Sessions of coding agents."""
    spec = AgentSessions(
        session_rate_per_s=0.1, duration_s=3_600.0, seed=seed, context_tokens=100_000,
        summary_tokens=20_000,
    )  # fmt: skip
    return list(islice(agent_sessions(spec), count))


def chats(seed: int, count: int) -> Rows:
    """Nine chats to a document of 10,000 to 40,000 tokens."""
    return poisson(mix, [(count / 10.0, 10.0)], seed)


MAKERS = {f.__name__: f for f in (documents, beside, sessions, chats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["documents", "sessions"])
    parser.add_argument("--loads", type=float, nargs="*", default=[0.8, 1.5])
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("trace      load flag    rejected: now shape forecast   in time: now shape forecast")
    for name in options.names:
        for load in options.loads:
            rows = at_load(MAKERS[name](options.seed, options.requests), load)
            for chunk in (0, 2_048):
                engine = replace(EngineConfig(), long_prefill_token_threshold=chunk)
                began = time.perf_counter()
                now, forecast, _ = play(rows, engine, observe=True)
                shape, _, _ = play(rows, engine, observe=False)
                assert forecast is not None
                figures = [100 * s.rejected for s in (now, shape, forecast)]
                figures += [100 * s.attained for s in (now, shape, forecast)]
                print(
                    f"{name:<10} {load:4g} {chunk:4d}           "
                    + " {:7.1f} {:5.1f} {:8.1f}          {:7.1f} {:5.1f} {:8.1f}".format(*figures)
                    + f"   {len(rows)} in {time.perf_counter() - began:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
