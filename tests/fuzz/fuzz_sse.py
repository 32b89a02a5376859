"""Fuzz the event scanner: `make fuzz`, or python tests/fuzz/fuzz_sse.py -max_total_time=60."""

import sys

import atheris

with atheris.instrument_imports(include=["forebay.traces.ground.sse"]):
    from invariants import check_sse


def one(data: bytes) -> None:
    given = atheris.FuzzedDataProvider(data)
    cuts = [given.ConsumeIntInRange(0, 1024) for _ in range(given.ConsumeIntInRange(0, 6))]
    check_sse(given.ConsumeBytes(given.remaining_bytes()), cuts)


atheris.Setup(sys.argv, one)
atheris.Fuzz()
