"""Garbage collections of the proxy are short, and few of them search what lives on."""

import gc
from typing import Any

from forebay.traces.ground.event_loop import short_collections

OBJECTS = 40_000


def test_few_collections_search_what_has_survived_one() -> None:
    """With Python's default, 40,000 objects that live on are searched five times more."""
    generations: list[int] = []

    def count(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    before = gc.get_threshold()
    with short_collections():
        gc.callbacks.append(count)
        try:
            alive = [[number] for number in range(OBJECTS)]
        finally:
            gc.callbacks.remove(count)
    assert len(alive) == OBJECTS
    assert 20 <= generations.count(0) <= 60  # each is short, and rings do not wait for long
    assert sum(generation > 0 for generation in generations) <= 1
    assert gc.get_threshold() == before
