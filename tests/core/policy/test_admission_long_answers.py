"""Decoding that is not as it was: long answers, a sudden change, slow memory, lost sessions."""

import random
from dataclasses import replace

import pytest
from overload import ENGINE, capacity, chat, long_answer, merged, play, poisson

from forebay.proxy.config.schema import Config
from forebay.proxy.core.model import Tenant
from forebay.replay.engine.hardware.find import find_gpu
from forebay.traces.ground.schema import TraceRequest

SECONDS = 60.0
ROUTES = ("warm_or_least_work", "least_work")


def wordy(rng: random.Random, number: int, at: float, tenant: str | None = None) -> TraceRequest:
    """Ten times the answer of a chat."""
    row = chat(rng, number, at, tenant)
    return replace(row, output_tokens=10 * row.output_tokens)


def test_a_tenant_with_long_answers_takes_no_more_than_half() -> None:
    """Both ask for 1.6 times the capacity. Longer answers slow the engines for both."""
    rate = 0.8 * capacity(chat)
    tenants = [Tenant("plain"), Tenant("other")]
    plain = poisson(chat, [(SECONDS, rate)], 1, "plain")
    late = {}
    for make in (chat, wordy):
        played = play(merged(plain, poisson(make, [(SECONDS, rate)], 2, "other")), tenants=tenants)
        assert played.of("plain").good_s() > 0.47 * played.good_s()
        late[make] = played.of("plain").late()
    assert late[wordy] < late[chat] + 0.02


def test_answers_that_become_long_at_noon() -> None:
    """The new lengths are learned: nobody is late for long, and as much is served as ever."""
    noon, rate = SECONDS / 2, 0.9 * capacity(wordy)
    short = [row for row in poisson(chat, [(SECONDS, rate)], 3) if row.arrival_s < noon]
    long_ones = [row for row in poisson(wordy, [(SECONDS, rate)], 4) if row.arrival_s >= noon]
    changed = play(merged(short, long_ones)).between(noon, SECONDS)
    always = play(poisson(wordy, [(SECONDS, rate)], 4)).between(noon, SECONDS)
    assert changed.good_s() > 0.95 * always.good_s()
    assert changed.late() < 0.02


@pytest.mark.parametrize("load", [0.8, 1.5])
def test_a_gpu_that_decodes_ten_times_slower(load: float) -> None:
    """Its memory has a tenth of the bandwidth, and its prefills are as fast as ever."""
    gpu = find_gpu("h200")
    slow = replace(ENGINE, gpu=replace(gpu, bandwidth=gpu.bandwidth / 10))
    rate = load * capacity(long_answer, engine=slow)
    played = play(poisson(long_answer, [(SECONDS, rate)], 5), engine=slow)
    assert played.late() < 0.05
    if load < 1.0:
        assert played.refused() == 0.0
        assert len(played.good) == len(played.outcomes)


def test_sessions_that_never_come_back() -> None:
    """A cache full of prompts that nobody repeats costs nothing beside a route without memory."""
    rate = capacity(chat)
    trace = poisson(chat, [(SECONDS, rate)], 6)
    played, without = (play(trace, config=Config(routing=name)) for name in ROUTES)
    assert len(played.good) > 0.98 * len(without.good)
    assert played.ttft_s(0.99) < 1.1 * without.ttft_s(0.99)
