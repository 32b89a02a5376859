"""Run a command that makes no cyclic objects without looking for these."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Look for no cyclic objects meanwhile, which costs a sixth of a simulation's time.

    Reading and simulating a trace make no such objects, and imports make few.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
