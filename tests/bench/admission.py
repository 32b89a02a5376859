"""Measure admission under overload, goal by goal, over many seeds.

    python tests/bench/admission.py

Virtual time, two simulated engines (Llama-3-8B, H200). A short form
of it runs in `tests/core/policy/test_overload.py`, which holds it to its limits.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from overload import (
    CHAT_S,
    DOCUMENT_S,
    capacity,
    chat,
    come_back,
    curve,
    is_back,
    light_beside_heavy,
    mean,
    mix,
    play,
    poisson,
    shares,
    step,
)

from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.fleet import SimOutcome
from forebay.traces.schema import TraceRequest

Line = tuple[str, str, str]
FACTORS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)


def spread(values: Iterable[float], form: str = ".2f") -> str:
    listed = sorted(values)
    return f"{mean(listed):{form}} ({listed[0]:{form}} to {listed[-1]:{form}})"


def goodput(seeds: range, seconds: float) -> Iterator[Line]:
    curves = [curve(FACTORS, seconds, seed) for seed in seeds]
    for factor in FACTORS:
        played = [one[factor] for one in curves]
        yield (
            f"goodput at {factor:g}x, of 1x",
            ">= 0.85 (goal 7)",
            spread(one[factor].good_s() / one[1.0].good_s() for one in curves)
            + f"; wasted {mean(p.wasted() for p in played):.1%}"
            f", late {mean(p.late() for p in played):.1%}"
            f", refused {mean(p.refused() for p in played):.0%}",
        )


def recovery(seeds: range, seconds: float) -> Iterator[Line]:
    for make, deadline_s in ((chat, CHAT_S), (mix, DOCUMENT_S)):
        steps = [step(make, deadline_s, seed, seconds / 4) for seed in seeds]
        yield (
            f"{make.__name__}: TTFT p95 from 2 deadlines after 5x on, of without",
            "1 (goal 10)",
            spread(after / without for after, without in steps),
        )


def misprediction(seeds: range, seconds: float) -> Iterator[Line]:
    rate = capacity(mix)
    for name, speed, bias in (
        ("as predicted", 1.0, 1.0),
        ("predicts twice too much", 1.0, 2.0),
        ("predicts half", 1.0, 0.5),
        ("engines half as fast", 0.5, 1.0),
        ("engines twice as fast", 2.0, 1.0),
        ("half as fast, predicts half", 0.5, 0.5),
    ):
        played = [
            play(
                poisson(mix, [(seconds, 1.5 * rate * speed)], seed),
                speeds=(speed, speed),
                bias=bias,
            )
            for seed in seeds
        ]
        yield (
            f"{name}, 1.5x",
            "late <= 2 %, <= 5 % (goal 9)",
            f"work in time {spread(p.good_s() / seconds / speed for p in played)} s/s; "
            f"late {mean(p.late() for p in played):.1%}, "
            f"wasted {mean(p.wasted() for p in played):.1%}",
        )


def half_speed(seeds: range, seconds: float) -> Iterator[Line]:
    rate = capacity(mix)
    both = [play(poisson(mix, [(seconds, 1.5 * rate)], s)).good_s() for s in seeds]
    played = [play(poisson(mix, [(seconds, 1.5 * rate)], s), speeds=(1.0, 0.5)) for s in seeds]
    yield (
        "one backend at half speed, 1.5x",
        "0.75 of two",
        spread(p.good_s() / b for p, b in zip(played, both, strict=True))
        + f"; late {mean(p.late() for p in played):.1%}",
    )


def fairness(seeds: range, seconds: float) -> Iterator[Line]:
    for make in (chat, mix):
        got = [shares((80, 15, 5), 3.0, seconds, seed, make) for seed in seeds]
        for name in got[0]:
            yield (
                f"80/15/5 of 3x, {make.__name__}: {name} got of its fair share",
                "0.9 to 1.1 (goal 12)",
                spread(one[name] for one in got),
            )
    for name, engine in {
        "vLLM's default flags": EngineConfig(),
        "by priority": EngineConfig(scheduling_policy="priority"),
        "by priority, 2,048 a step": EngineConfig(
            scheduling_policy="priority", max_num_batched_tokens=2_048
        ),
    }.items():
        pairs = [light_beside_heavy(seconds, seed, engine) for seed in seeds]
        yield (
            f"light tenant's TTFT p99 beside 10x its share, of alone: {name}",
            "<= 1.3 (goal 12)",
            spread(beside / alone for alone, beside in pairs),
        )
    yield (
        "the same at least, as vLLM interrupts no step: by priority, 2,048 a step",
        "-",
        spread(uninterrupted(seconds, seed) for seed in seeds),
    )


def uninterrupted(seconds: float, seed: int, step: int = 2_048) -> float:
    """The least p99 beside a flood over the p99 alone, where every step is full.

    A request that goes before everything else still waits for the rest of the step that runs, and
    each of its own steps is filled up with others' tokens.
    """
    engine = EngineConfig(scheduling_policy="priority", max_num_batched_tokens=step)
    full_s = play([TraceRequest("full", 0.0, step, 1)], engine=engine).ttft_s(1.0)
    rng = random.Random(seed)
    light = play(poisson(chat, [(seconds, 0.2 * capacity(chat))], seed, "light"), engine=engine)
    least = sorted(
        (o.ttft_s or 0.0) + full_s * (rng.random() + -o.request.input_tokens % step / step)
        for o in light.outcomes
    )
    return least[int(0.99 * len(least))] / light.ttft_s(0.99)


def honesty(seeds: range, seconds: float) -> Iterator[Line]:
    """Whether clients that come back at their Retry-After are taken, and what that costs others.

    A tenth that comes back once, and everybody, twice at most, as openai-python does.
    """
    rate = capacity(mix)
    spike = [(10.0, 0.5 * rate), (20.0, 5 * rate), (80.0, 0.5 * rate)]
    loads = {"a spike of 5x for 20 s": (spike, 30.0)} | {
        f"{factor:g}x throughout": ([(seconds, factor * rate)], seconds)
        for factor in FACTORS
        if factor > 1.0
    }
    for name, (pieces, end) in loads.items():
        traces = [poisson(mix, pieces, seed) for seed in seeds]
        for who, share, tries in (("a tenth, once", 0.1, 1), ("all, twice", 1.0, 2)):
            played = [come_back(t, s, share, tries) for t, s in zip(traces, seeds, strict=True)]
            back = [[o for o in one.outcomes if is_back(o)] for one in played]
            during = [o for one in back for o in one if o.request.arrival_s < end]
            first = [o for p in played for o in p.between(0.0, end).outcomes if not is_back(o)]
            good_s = mean(p.between(0.0, end).good_s() for p in played) / end
            yield (
                f"came back at Retry-After ({who}) and were taken, {name}",
                ">= 80 % (goal 9)",
                spread((taken(one) for one in back if one), ".0%")
                + f"; of {len(during)} before its end {taken(during):.0%}, of new ones "
                f"{taken(first):.0%}; work in time {good_s:.2f} s/s, "
                f"late {mean(p.late() for p in played):.1%}",
            )


def taken(outcomes: Sequence[SimOutcome]) -> float:
    return sum(o.served is not None for o in outcomes) / max(1, len(outcomes))


PARTS: dict[str, Callable[[range, float], Iterator[Line]]] = {
    "goodput": goodput,
    "recovery": recovery,
    "misprediction": misprediction,
    "half_speed": half_speed,
    "fairness": fairness,
    "honesty": honesty,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals")
    options = parser.parse_args()
    started = time.process_time()
    print(
        f"seeds 0 to {options.seeds - 1}, {options.seconds:g} s of arrivals; mean (least to most)"
    )
    for part in options.parts:
        for what, wanted, got in PARTS[part](range(options.seeds), options.seconds):
            print(f"{what:<58} {wanted:<26} {got}", flush=True)
    print(f"{time.process_time() - started:.0f} s of CPU")


if __name__ == "__main__":
    main()
