"""Read from run.json the options of `forebay replay` that were not defaults, as typed.

The file may be from an older run, or damaged. Values that no replay writes are left out, and
control characters are removed.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from forebay.analysis.runs.run import at_path
from forebay.analysis.statistics.units import printable
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.slo import Slo, default_slos
from forebay.traces.buckets import DEFAULT_BUCKETS, LengthBucket, named_bucket

_Made = TypeVar("_Made")
_DEFAULTS = {option.name: option.default for option in fields(ReplayOptions)}


def given_options(info: Mapping[str, Any]) -> list[str]:
    """The options of the command besides trace, targets, pace, seed, endpoint and --out.

    Model and context limit are always included, because run.json records the values in use,
    whether or not they were given.
    """
    options: list[tuple[str, Any]] = [
        ("--model", info.get("model")),
        ("--salt", _unless_default(info, "salt")),
        ("--max-model-len", info.get("max_model_len")),
        ("--warmup", _unless_default(info, "warmup")),
    ]
    if not str(info.get("arrivals")).startswith(
        "closed"
    ):  # closed:N records its N as max_in_flight
        options.append(("--max-in-flight", _unless_default(info, "max_in_flight")))
    buckets = _listed(info, "buckets", _bucket) or DEFAULT_BUCKETS
    if buckets != DEFAULT_BUCKETS:
        options.append(
            ("--buckets", ",".join(f"{bucket.name}:{bucket.up_to}" for bucket in buckets))
        )
    words = [
        word
        for option, value in options
        if value is not None
        for word in (option, printable(str(value)))
    ]
    words += slo_option(info)
    return [*words, "--skip-bad"] if at_path(info, ("trace", "skipped_bad")) else words


def slo_option(info: Mapping[str, Any]) -> list[str]:
    """The option --slo, if the latency targets are not the default ones."""
    buckets = _listed(info, "buckets", _bucket) or DEFAULT_BUCKETS
    slos = _listed(info, "slos", _slo)
    if not slos or slos == default_slos(buckets):
        return []
    return ["--slo", printable(",".join(map(_as_typed, slos)))]


def _unless_default(info: Mapping[str, Any], name: str) -> Any:
    value = info.get(name)
    return None if value == _DEFAULTS[name] else value


def _listed(info: Mapping[str, Any], key: str, make: Callable[[Any], _Made]) -> tuple[_Made, ...]:
    try:
        return tuple(map(make, info.get(key) or ()))
    except (TypeError, KeyError, ValueError):
        return ()


def _bucket(bucket: Any) -> LengthBucket:
    return named_bucket(str(bucket["name"]), int(bucket["up_to"]))


def _slo(slo: Any) -> Slo:
    bucket = slo["bucket"]
    return Slo(bucket and str(bucket), str(slo["metric"]), float(slo["limit_s"]))


def _as_typed(slo: Slo) -> str:
    """The target as `--slo` takes it: decimals, no exponent."""
    limit = f"{slo.limit_s:.6f}".rstrip("0").rstrip(".")
    return f"{slo.bucket + '.' if slo.bucket else ''}{slo.metric}={limit}s"
