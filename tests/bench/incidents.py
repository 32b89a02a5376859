"""Print the time until each place names the cause of an incident.

Stages the incidents of `tests/support/incident_scenes.py`. The minutes are from the beginning of
the incident to the first line of the log that names its cause. The live page and `forebay explain`
show it from then on.

Before: commit a435a73 played the same scenes on 2026-11-27, with its `doctor` asked every 15 s.

    died, hangs                     named by log, page and doctor after 0.0 and 0.1 minutes
    is_slow, prefix_caching_off,
    short_of_cpu                    named by doctor alone, whenever it was asked
    restarted_cold                  never (doctor: "keeps only 25% of the prefixes")
    flood, small_kv_pool            never (doctor: 872 and 52 rejections, no tenant and no cause)
    documents                       never (doctor after 0.8 minutes: rejections)
    slow_clients                    never
    slow_tokenizer                  not by its code; its simulated engine had no API server

`explain --slowest` named none: "its prompt of 1,878 tokens, 0 cached, as predicted".
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import incident_scenes as scenes
from incident_scenes import Told

PLACES = ("`doctor --since 1m`", "`explain --slowest`", "the live page", "the log")

SCENES: tuple[tuple[str, str, str], ...] = (
    # name of the scene, check, words of the log
    ("died", "backends take work", "b1 is down"),
    ("hangs", "backends take work", "b1 is down"),
    ("is_slow", "speed of backends", "b1 needs"),
    ("restarted_cold", "restarts", "b0 has restarted"),
    ("flood", "tenants", "tenant acme"),
    ("documents", "long documents", "bucket document"),
    ("small_kv_pool", "room for KV cache", "room in the KV cache"),
    ("prefix_caching_off", "prefix caching", "prefix caching is off"),
    ("slow_tokenizer", "tokenizers", "the rest is its API server"),
    ("slow_clients", "network of clients", "s to send their prompts"),
    ("short_of_cpu", "event loop and memory", "event loop was late"),
)


def played(name: str) -> Told:
    scene: Callable[..., Told] = getattr(scenes, name)
    if name != "flood":
        return scene()
    with TemporaryDirectory() as folder:
        return scene(Path(folder))


def table() -> Iterator[str]:
    """Yield the rows, then a sentence about the places that name each cause first."""
    yield "| incident | minutes |"
    yield "| --- | --- |"
    late = []
    for name, check, words in SCENES:
        told = played(name)
        named = [(at, event) for at, event, line in told.events if words in line]
        at_s = max(0.0, named[0][0]) if named else float("inf")
        earlier = [at for at, event, _ in told.events if event == "finding" and 0 <= at < at_s]
        firsts = (
            told.findings[0].check == check,
            told.explained[:1] == [check],
            told.page[:1] == [check],
            bool(named) and not earlier,
        )
        what = (getattr(scenes, name).__doc__ or "").rstrip(".")
        late += [
            f"{place}: {what}" for place, first in zip(PLACES, firsts, strict=True) if not first
        ]
        minutes = "0.5 at most" if name == "short_of_cpu" else f"{at_s / 60:.1f}"
        yield f"| {what} | {minutes} |"
    yield ""
    first = f"{', '.join(PLACES[:-1])} and {PLACES[-1]} name the cause first"
    yield f"{first}, except for {'; '.join(late)}." if late else f"{first} each time."


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for line in table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
