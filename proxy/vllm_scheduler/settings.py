"""The operator's settings, and the engines that are supported."""

from typing import Any, Final

SHORTEST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 60.0
OLDEST, NEWEST = (0, 26), (0, 33)
"""Versions whose own scheduler was compared with this class on random workloads."""


def read_pause(additional_config: object) -> float:
    """Return the longest pause inside an answer, seconds. Other keys belong to others.

    Args:
        additional_config: the value of vLLM's `--additional-config`.

    Raises:
        ValueError: a setting is unknown or has no usable value.
    """
    own = additional_config.get("forebay", {}) if isinstance(additional_config, dict) else {}
    where = '--additional-config: "forebay"'
    if not isinstance(own, dict):
        raise ValueError(f'{where} is {own!r}; give an object, such as {{"pause": 0.1}}')
    if unknown := sorted(set(own) - {"pause"}):
        raise ValueError(f'{where} has no setting "{unknown[0]}"; there is "pause"')
    pause = own.get("pause", 0.1)
    is_number = isinstance(pause, int | float) and not isinstance(pause, bool)
    if not is_number or not SHORTEST_PAUSE_S <= pause <= LONGEST_PAUSE_S:
        raise ValueError(
            f"{where}: pause is {pause!r}; give seconds between {SHORTEST_PAUSE_S:g} and"
            f" {LONGEST_PAUSE_S:g}"
        )
    return float(pause)


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
