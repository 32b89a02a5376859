"""The operator's settings, and the engines that are supported."""

from dataclasses import dataclass
from typing import Any, Final, TypeGuard

SHORTEST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 60.0
OLDEST, NEWEST = (0, 26), (0, 33)
"""Versions whose own scheduler was compared with this class on random workloads."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The value of "forebay" in vLLM's `--additional-config`.

    Attributes:
        pause: longest pause inside an answer, seconds.
    """

    pause: float = 0.1


def read_settings(additional_config: object) -> Settings:
    """Return the settings. Other keys belong to others.

    Raises:
        ValueError: a setting is unknown or has no usable value.
    """
    own = additional_config.get("forebay", {}) if isinstance(additional_config, dict) else {}
    where = '--additional-config: "forebay"'
    if not isinstance(own, dict):
        raise ValueError(f'{where} is {own!r}; give an object, such as {{"pause": 0.1}}')
    if unknown := sorted(set(own) - {"pause"}):
        raise ValueError(f'{where} has no setting "{unknown[0]}"; there is "pause"')
    pause = own.get("pause", Settings().pause)
    if not is_pause(pause):
        raise ValueError(
            f"{where}: pause is {pause!r}; give seconds between {SHORTEST_PAUSE_S:g} and"
            f" {LONGEST_PAUSE_S:g}"
        )
    return Settings(float(pause))


def is_pause(value: object) -> TypeGuard[float]:
    """True for a number of seconds that a pause may have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return SHORTEST_PAUSE_S <= value <= LONGEST_PAUSE_S


def check_engine(version: str, vllm_config: Any) -> None:
    """Refuse an engine whose scheduler is not known.

    Raises:
        ValueError: another version of vLLM, or a model that vLLM schedules in a way of its own.
    """
    numbers = version.split(".")[:2]
    minor = tuple(int(n) for n in numbers if n.isdecimal())
    if len(minor) != 2 or not OLDEST <= minor <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise ValueError(
            f"ForebayScheduler knows vLLM {oldest} to {newest}, and this is {version}; start"
            " without --scheduler-cls, or look for a newer Forebay"
        )
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise ValueError(
            "ForebayScheduler cannot schedule a diffusion model; start without --scheduler-cls"
        )
