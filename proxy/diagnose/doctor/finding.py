"""The findings that the checks of `forebay doctor` yield."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]

FEW = 20
"""Requests or answers below which a share says nothing."""


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
