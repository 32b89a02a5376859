"""The processes that keep cores awake during a live run: there while it goes on, and only then."""

import os
import time

import pytest
from arena_processes import cores_awake

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_IDLE"), reason="only Linux runs a process when nobody else would"
)


def test_each_core_has_one_that_steps_aside_for_everybody() -> None:
    until = time.monotonic() + 30
    with cores_awake() as idlers:
        assert len(idlers) == len(os.sched_getaffinity(0))
        while {os.sched_getscheduler(pid) for pid in idlers} != {os.SCHED_IDLE}:
            assert time.monotonic() < until, "they run like everybody else"
            os.sched_yield()
    for pid in idlers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
