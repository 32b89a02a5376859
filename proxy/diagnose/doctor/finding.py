"""The findings that the checks of `forebay doctor` yield."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]

FEW = 20
"""Requests or answers below which a share says nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        text: what, with the figures.
        remedy: what to do.
    """

    check: str
    severity: Severity
    text: str
    remedy: str


Found = Iterator[tuple[Severity, str, str]]
