"""Write the `forebay replay` command that repeats a run, from run.json.

The file may be from an older run, or damaged. Values that no replay writes are left out, and
control characters are removed. Model and context limit are always included, because run.json
records the values in use, whether or not they were given.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from forebay.analysis.runs.provenance import text_of
from forebay.analysis.runs.run import RunData, at_path
from forebay.analysis.statistics.units import printable
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.slo import Slo, default_slos
from forebay.traces.ground.buckets import DEFAULT_BUCKETS, LengthBucket, named_bucket

KEYS = ("arrivals", "rate_per_s", "speed", "duration_s", "time_scale", "endpoint", "too_long",
        "seed", "model", "salt", "max_model_len", "warmup", "max_in_flight")  # fmt: skip
"""Keys of run.json in the order of their options, whose names have no unit."""
LEFT_OUT = ("salt", "warmup", "max_in_flight")  # if they have the default

_Made = TypeVar("_Made")
_DEFAULTS = {option.name: option.default for option in fields(ReplayOptions)}


def replay_command(run: RunData) -> str:
    """Return the command, or "" if no command alone repeats the run."""
    info = run.info
    trace, targets = at_path(info, ("trace", "path")), info.get("targets")
    if not isinstance(trace, str) or not isinstance(targets, list) or "merged" in info:
        return ""
    words = ["forebay", "replay", trace]
    for target in targets:
        words += ["--target", text_of(at_path(target, ("url",)))]
    closed = str(info.get("arrivals")).startswith("closed")  # it has its limit in --arrivals
    for key in KEYS:
        value = info.get(key)
        usual = key in LEFT_OUT and value == _DEFAULTS[key]
        if value is not None and not usual and not (closed and key == "max_in_flight"):
            name = key.removesuffix("_per_s").removesuffix("_s").replace("_", "-")
            words += [f"--{name}", text_of(value)]
    buckets = _listed(info, "buckets", _bucket) or DEFAULT_BUCKETS
    if buckets != DEFAULT_BUCKETS:
        words += ["--buckets", ",".join(f"{bucket.name}:{bucket.up_to}" for bucket in buckets)]
    words += slo_option(info)
    if at_path(info, ("trace", "skipped_bad")):
        words.append("--skip-bad")
    return shlex.join(map(printable, [*words, "--out", run.path.name]))


def slo_option(info: Mapping[str, Any]) -> list[str]:
    """The option --slo, if the latency targets are not the default ones."""
    buckets = _listed(info, "buckets", _bucket) or DEFAULT_BUCKETS
    slos = _listed(info, "slos", _slo)
    if not slos or slos == default_slos(buckets):
        return []
    return ["--slo", printable(",".join(map(_as_typed, slos)))]


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
