"""Read from run.json how a run was made, and find differences that forbid a comparison.

Only facts in the file are reported. `MUST_AGREE` lists the settings that must be equal, so that
a comparison is between servers and not between loads. The file may be from an older run, or
damaged: values that no replay writes are left out of a command that repeats the run.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from forebay.analysis.runs.run import RunData, at_path
from forebay.analysis.statistics.units import printable
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.slo import Slo, default_slos
from forebay.replay.results.verdict import FAILED, INTERRUPTED, OTHER_LOAD
from forebay.traces.ground.buckets import DEFAULT_BUCKETS, LengthBucket, named_bucket
from forebay.traces.ground.command_line.plugins import from_lab

LATENCY_TARGETS = "latency targets"
WARM = "warm caches at the start"
IN_SUMMARY = (LATENCY_TARGETS, WARM)
VALID = "valid"

# label: path in run.json, or in summary.json for the labels in IN_SUMMARY
PLACES: dict[str, tuple[str, ...]] = {
    "started": ("started_at",),
    "ended": ("ended",),
    "trace": ("trace", "path"),
    "trace sha256": ("trace", "sha256"),
    "trace rows": ("trace", "rows"),
    "left out, too long": ("trace", "dropped_too_long"),
    "cut, too long": ("trace", "truncated_too_long"),
    "skipped, unreadable": ("trace", "skipped_bad"),
    "arrivals": ("arrivals",),
    "rate": ("rate_per_s",),
    "load": ("load",),
    "speed": ("speed",),
    "duration limit": ("duration_s",),
    "seed": ("seed",),
    "schedule sha256": ("schedule", "sha256"),
    "time scale": ("time_scale",),
    "targets": ("targets",),
    "model": ("model",),
    "endpoint": ("endpoint",),
    "salt": ("salt",),
    "too-long rows": ("too_long",),
    "context limit": ("max_model_len",),
    "max in flight": ("max_in_flight",),
    "warm-up": ("warmup",),
    LATENCY_TARGETS: ("slos",),
    WARM: ("warm_caches",),
    "versions": ("versions",),
    "platform": ("platform",),
    "processors": ("cpus",),
}
MUST_AGREE = (
    "trace sha256",
    "arrivals",
    "rate",
    "load",
    "speed",
    "duration limit",
    "seed",
    "time scale",
    "model",
    "endpoint",
    LATENCY_TARGETS,
    WARM,
)
# Keys of run.json in the order of their options, whose names have no unit. Model and context limit
# are among them: run.json records the values in use, whether or not they were given.
KEYS = ("arrivals", "rate_per_s", "speed", "duration_s", "time_scale", "endpoint", "too_long",
        "seed", "model", "salt", "max_model_len", "warmup", "max_in_flight")  # fmt: skip
LEFT_OUT = ("salt", "warmup", "max_in_flight")  # if they have the default
_DEFAULTS = {option.name: option.default for option in fields(ReplayOptions)}
HASH_SHOWN = 12  # characters of a hash in a sentence
COMPLETE = "complete"
LATE = "client-limited"
LATE_SHARE = 0.1  # with more arrivals late, the load was another than the one asked for
DELAYS = "; its figures include delays of the client"
OTHER_CAUSES = (OTHER_LOAD, INTERRUPTED, FAILED)  # verdicts that say nothing about the client
_MEANINGS = {
    LATE: "the load generator was too slow",
    "cap-limited": "requests waited for --max-in-flight",
    OTHER_LOAD: "the load was another than the trace's",
}


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """True if the run measured the servers, not the client. `reason` may be empty."""

    word: str
    reason: str

    @property
    def valid(self) -> bool:
        return self.word == VALID

    @property
    def meaning(self) -> str:
        return _MEANINGS.get(self.word, f"the verdict is {self.word}")

    @property
    def cause(self) -> str:
        """The reason without advice."""
        return re.split(r"; | because ", self.reason, maxsplit=1)[0]

    def __str__(self) -> str:
        return f"{self.word} ({self.reason})" if self.reason else self.word


def setting(run: RunData, what: str) -> Any:
    """The value of one of `PLACES`, None if the file lacks it. A merged run has several seeds."""
    tree = run.summary if what in IN_SUMMARY else run.info
    value = at_path(tree, PLACES[what])
    parts = at_path(run.info, ("merged", "runs"))
    if what == "seed" and value is None and isinstance(parts, list):
        return sorted((at_path(part, ("seed",)) for part in parts), key=str)
    return value


def settings(run: RunData) -> dict[str, str]:
    """The known settings of the run as text. Zeros are left out, except for the seed."""
    command = repeat_command(run)
    texts = {"command": command, "before it": _start_first(run) if command else ""}
    texts |= {what: text_of(setting(run, what)) for what in PLACES}
    return {what: text for what, text in texts.items() if text not in ("", "0") or what == "seed"}


def repeat_command(run: RunData) -> str:
    """The `forebay replay` or `simulate` command that repeats the run, "" if none alone does."""
    info = run.info
    if info.get("simulated"):
        return str(from_lab("simulate_command")(run))
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
    buckets = _buckets(info)
    if buckets != DEFAULT_BUCKETS:
        words += ["--buckets", ",".join(f"{bucket.name}:{bucket.up_to}" for bucket in buckets)]
    words += slo_option(info)
    if at_path(info, ("trace", "skipped_bad")):
        words.append("--skip-bad")
    return shlex.join(map(printable, [*words, "--out", run.path.name]))


def slo_option(info: Mapping[str, Any]) -> list[str]:
    """The option --slo, if the latency targets are not the default ones."""
    slos = _listed(info, "slos", _slo)
    if not slos or slos == default_slos(_buckets(info)):
        return []
    # As `--slo` takes them: decimals, no exponent.
    limits = [f"{slo.limit_s:.6f}".rstrip("0").rstrip(".") for slo in slos]
    names = [f"{slo.bucket + '.' if slo.bucket else ''}{slo.metric}" for slo in slos]
    texts = [f"{name}={limit}s" for name, limit in zip(names, limits, strict=True)]
    return ["--slo", printable(",".join(texts))]


def _listed(info: Mapping[str, Any], key: str, make: Callable[[Any], Any]) -> tuple[Any, ...]:
    try:
        return tuple(map(make, info.get(key) or ()))
    except (TypeError, KeyError, ValueError):
        return ()


def _buckets(info: Mapping[str, Any]) -> tuple[LengthBucket, ...]:
    def bucket(entry: Any) -> LengthBucket:
        return named_bucket(str(entry["name"]), int(entry["up_to"]))

    return _listed(info, "buckets", bucket) or DEFAULT_BUCKETS


def _slo(slo: Any) -> Slo:
    bucket = slo["bucket"]
    return Slo(bucket and str(bucket), str(slo["metric"]), float(slo["limit_s"]))


def _start_first(run: RunData) -> str:
    """State that servers of this machine must run again, or "" for other servers."""
    near = sorted(at for at in _servers(run) if at.startswith(("127.", "localhost:", "::1:")))
    return f"start the servers at {', '.join(near)}, or give their new addresses" if near else ""


def text_of(value: Any) -> str:
    """Format a JSON value in one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(str(key))} {text_of(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(text_of(item) for item in value)
    if isinstance(value, float):
        return f"{value:.12g}"
    return printable(str(value))


def simulated(run: RunData) -> str:
    """Return the GPUs of a simulated run in words, or "" for a measured run."""
    if not run.info.get("simulated"):
        return ""
    mix = run.info.get("gpu_mix") or [at_path(run.info, ("engine", "gpu"))]
    gpus = " + ".join(text_of(gpu).upper() for gpu in mix)
    return f"simulated: {text_of(run.info.get('gpus'))} × {gpus}, virtual time"


def verdict(run: RunData) -> RecordedVerdict:
    value = run.summary.get("verdict")
    reason = text_of(run.summary.get("verdict_reason"))
    if (at_s := run.number("verdict_at_s")) is not None:
        reason += f"{', ' if reason else ''}first at {at_s:.1f} s"
    return RecordedVerdict(text_of(value) or "unknown", reason)


def is_little_late(run: RunData) -> bool:
    """True if the load generator was late for some arrivals, but for at most `LATE_SHARE`."""
    late = run.number("late_arrivals")  # older runs do not say
    return verdict(run).word == LATE and late is not None and late <= LATE_SHARE * run.requests


def footnote(run: RunData) -> str:
    """Return a sentence on delays of the client that change no conclusion."""
    judged = verdict(run)
    return f"{run.name}: the machine was busy: {judged.cause}; figures may be a little high."


def differences(a: RunData, b: RunData, judged_anew: bool = False) -> list[str]:
    """The settings of `MUST_AGREE` that differ. `judged_anew` leaves out latency targets."""
    return [
        what
        for what in MUST_AGREE
        if not (what == LATENCY_TARGETS and judged_anew)
        and not _unrecorded(a, b, what)
        and text_of(setting(a, what)) != text_of(setting(b, what))
    ]


def _unrecorded(a: RunData, b: RunData, what: str) -> bool:
    """True if a file of another tool, which records no settings, lacks this one."""
    if what == WARM and None in (setting(a, what), setting(b, what)):  # an older run
        return True
    return any("made_by" in run.info and setting(run, what) is None for run in (a, b))


def warnings(
    a: RunData, b: RunData, doubtful: tuple[bool, bool], judged_anew: bool = False
) -> list[str]:
    """Reasons why the runs may differ although the servers do not.

    `doubtful` marks a run whose client was late enough to matter, or waited for --max-in-flight.
    Different latency targets do not matter if both runs are judged again by equal targets.
    """
    # First what each run says about itself.
    reasons = [
        f"{run.name}: {words}"
        for run, in_doubt in zip((a, b), doubtful, strict=True)
        for words in _of_itself(run, in_doubt)
    ]
    # Then the differences between both runs.
    silent = [run.name for run in (a, b) if "made_by" in run.info]
    if silent and a is not b:
        names = " and ".join(dict.fromkeys(silent))
        reasons.append(
            f"{names}: trace, pace and model are not recorded; check that they are equal"
        )
    reasons += [_different(a, b, what) for what in differences(a, b, judged_anew)]
    if a.requests != b.requests:
        reasons.append(f"different number of requests: {a.requests:,} and {b.requests:,}")
    return reasons + _shared_cache(a, b)


def _different(a: RunData, b: RunData, what: str) -> str:
    """Return a warning that the runs have not the same setting."""
    of_a, of_b = (text_of(setting(run, what)) for run in (a, b))
    if what.endswith("sha256"):
        of_a, of_b = of_a[:HASH_SHOWN], of_b[:HASH_SHOWN]
    chance = "; the arrivals differ, and the intervals allow for that" if what == "seed" else ""
    return (
        f"different {what}: {a.name} {of_a or 'not recorded'}, "
        f"{b.name} {of_b or 'not recorded'}{chance}"
    )


def _of_itself(run: RunData, in_doubt: bool) -> list[str]:
    words = [simulated(run)] if simulated(run) else []
    if in_doubt:
        judged = verdict(run)
        words.append(f"verdict {judged}{'' if judged.word in OTHER_CAUSES else DELAYS}")
    ended = text_of(setting(run, "ended"))
    if ended not in ("", COMPLETE):
        words.append(f"ended by {ended}; its last requests are missing")
    own = run.summary.get("warnings")
    return words + [text_of(warning) for warning in (own if isinstance(own, list) else ())]


def _shared_cache(a: RunData, b: RunData) -> list[str]:
    """A warning if both runs sent equal prompts to one server.

    The files do not record whether the server was restarted in between.
    """
    for what in ("salt", "trace sha256", "model", "endpoint"):
        of_a = setting(a, what)
        if not isinstance(of_a, str) or of_a != setting(b, what):
            return []
    at_a, at_b = (text_of(setting(run, "started")) for run in (a, b))
    both = _servers(a) & _servers(b)
    if not at_a or not at_b or at_a == at_b or not both:  # equal times: a run and itself
        return []
    first, second = (a, b) if at_a < at_b else (b, a)
    return [
        f"{second.name} sent the prompts of {first.name} to {min(both)} again, so its cache may "
        "have held them; repeat it without --salt"
    ]


def _servers(run: RunData) -> set[str]:
    """HOST:PORT of each target."""
    targets = setting(run, "targets")
    servers = set()
    for target in targets if isinstance(targets, list) else ():
        try:
            parts = urlsplit(text_of(at_path(target, ("url",))))
            port = parts.port or {"https": 443}.get(parts.scheme, 80)
        except ValueError:  # not an address
            continue
        if parts.hostname:
            servers.add(f"{parts.hostname}:{port}")
    return servers
