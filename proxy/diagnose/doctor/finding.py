"""The findings that the checks of `forebay doctor` yield."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
"""`info`: true and worth knowing, but no fault: `forebay doctor` exits with 0."""
ORDER: tuple[Severity, ...] = ("error", "warning", "info")

FEW = 20
"""Requests or answers below which a share says nothing."""
GONE = 0.1
"""Share of the answers in a time. An engine that has not counted them has restarted since."""
SOME = 0.01  # share of all requests: more errors, rejections or preemptions are a finding


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of the proxy, a backend or their configuration.

    Attributes:
        text: the fault, with the figures.
        remedy: what to do about it.
    """

    check: str
    severity: Severity
    text: str
    remedy: str


Found = Iterator[tuple[Severity, str, str]]
