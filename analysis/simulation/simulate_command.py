"""Write the `forebay simulate` command that repeats a simulation."""

import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from forebay.analysis.runs.provenance import slo_option
from forebay.analysis.runs.run import RunData, at_path
from forebay.replay.sim.cli import DEFAULT_POLICY

OPTIONS = (
    ("--arrivals", "arrivals", "trace"),
    ("--rate", "rate_per_s", None),
    ("--load", "load", None),
    ("--speed", "speed", None),
    ("--duration", "duration_s", None),
    ("--seed", "seed", 0),
)


def simulate_command(run: RunData) -> str:
    """Return the command, or "" if a file of the proxy or of step times took part."""
    info = run.info
    trace, engine = at_path(info, ("trace", "path")), info.get("engine")
    if not isinstance(trace, str) or not isinstance(engine, Mapping):
        return ""
    options = _engine_options(engine)
    if options is None or not _has_usual_proxy(info):
        return ""
    mix = info.get("gpu_mix") or [engine.get("gpu")]
    words = ["forebay", "simulate", trace, "--gpus", info.get("gpus"), "--model"]
    words += [engine.get("model"), "--gpu", "+".join(map(str, mix)), *options]
    if info.get("policy") != DEFAULT_POLICY:
        words += ["--policy", info.get("policy")]
    for option, key, default in OPTIONS:
        if (value := info.get(key)) not in (None, default):
            words += [option, f"{value:.12g}" if isinstance(value, float) else value]
    words += slo_option(info)
    return shlex.join(map(str, [*words, "--out", f"{run.name}-again"]))


def _has_usual_proxy(info: Mapping[str, Any]) -> bool:
    """True if no file configured the proxy. A run does not keep the path of a file."""
    from forebay.proxy.config.schema import Config

    usual = Config().model_dump(mode="json", exclude={"upstream_api_key"})
    return bool(usual == info.get("proxy"))


def _engine_options(engine: Mapping[str, Any]) -> list[str] | None:
    """Return the given flags of vLLM, or None for a setting that is not a flag."""
    from forebay.replay.engine.config import EngineConfig
    from forebay.replay.engine.flags import EngineFlags

    flags = {flag.name for flag in fields(EngineFlags)}
    usual = {option.name: str(option.default) for option in fields(EngineConfig)}
    words: list[str] = []
    for name, value in engine.items():
        if name in ("model", "gpu"):
            if str(value).startswith("{"):  # sizes that a program gave, not a name
                return None
        elif value != usual.get(name):
            if name not in flags:
                return None
            option = name.replace("_", "-")
            switches = {"True": [f"--{option}"], "False": [f"--no-{option}"]}
            words += switches.get(str(value), [f"--{option}", str(value)])
    return words
