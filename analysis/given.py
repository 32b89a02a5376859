"""Which options of `forebay replay` were not the defaults, from run.json, as one would type them.

The file may be of an older run or damaged: what does not stand in it as a replay writes it is left
out, and no text from it reaches a terminal with control characters.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from forebay.analysis.run import at_path
from forebay.analysis.units import printable
from forebay.replay.options import ReplayOptions
from forebay.replay.slo import Slo, default_slos
from forebay.traces.buckets import DEFAULT_BUCKETS, LengthBucket

_Made = TypeVar("_Made")
_DEFAULTS = {one.name: one.default for one in fields(ReplayOptions)}


def given_options(info: Mapping[str, Any]) -> list[str]:
    """The words that a command needs beside trace, targets, pace, seed, endpoint and --out.

    Model and context limit are recorded as the run found them, whether or not they were given:
    they are always told.
    """
    options: list[tuple[str, Any]] = [
        ("--model", info.get("model")),
        ("--salt", _unless_default(info, "salt")),
        ("--max-model-len", info.get("max_model_len")),
        ("--warmup", _unless_default(info, "warmup")),
    ]
    if not str(info.get("arrivals")).startswith("closed"):  # whose N stands in the same place
        options.append(("--max-in-flight", _unless_default(info, "max_in_flight")))
    buckets = _listed(info, "buckets", _bucket) or DEFAULT_BUCKETS
    if buckets != DEFAULT_BUCKETS:
        options.append(("--buckets", ",".join(f"{one.name}:{one.up_to}" for one in buckets)))
    slos = _listed(info, "slos", _slo)
    if slos != default_slos([one.name for one in buckets]):
        options.append(("--slo", ",".join(map(_as_typed, slos)) or None))
    words = [
        word
        for option, value in options
        if value is not None
        for word in (option, printable(str(value)))
    ]
    return [*words, "--skip-bad"] if at_path(info, ("trace", "skipped_bad")) else words


def _unless_default(info: Mapping[str, Any], name: str) -> Any:
    value = info.get(name)
    return None if value == _DEFAULTS[name] else value


def _listed(info: Mapping[str, Any], key: str, make: Callable[[Any], _Made]) -> tuple[_Made, ...]:
    try:
        return tuple(map(make, info.get(key) or ()))
    except (TypeError, KeyError, ValueError):
        return ()


def _bucket(one: Any) -> LengthBucket:
    return LengthBucket(str(one["name"]), int(one["up_to"]))


def _slo(one: Any) -> Slo:
    bucket = one["bucket"]
    return Slo(bucket and str(bucket), str(one["metric"]), float(one["limit_s"]))


def _as_typed(slo: Slo) -> str:
    """As `--slo` takes it: decimals, no exponent."""
    limit = f"{slo.limit_s:.6f}".rstrip("0").rstrip(".")
    return f"{slo.bucket + '.' if slo.bucket else ''}{slo.metric}={limit}s"
