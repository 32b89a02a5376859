"""Forebay with one part of its policy switched off each."""

from collections.abc import Callable, Mapping, Sequence

from arena_score import Played

from forebay.replay.sim.fleet import Policy

WITHOUT: dict[str, Callable[[Sequence[str]], Policy]] = {}


def show(results: Mapping[str, Mapping[str, Played]]) -> None:
    pass
