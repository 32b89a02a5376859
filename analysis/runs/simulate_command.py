"""Write the `forebay simulate` command that repeats a simulation."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from forebay.analysis.runs.replay_options import slo_option
from forebay.analysis.runs.run import RunData, at_path
from forebay.replay.sim.cli import DEFAULT_POLICY
from forebay.traces.errors import InputError

OPTIONS = (
    ("--arrivals", "arrivals", "trace"),
    ("--rate", "rate_per_s", None),
    ("--load", "load", None),
    ("--speed", "speed", None),
    ("--duration", "duration_s", None),
    ("--seed", "seed", 0),
)


def simulate_command(run: RunData) -> str:
    """Return the command, or "" if options of the engine or the proxy's file took part."""
    info = run.info
    trace, engine = at_path(info, ("trace", "path")), info.get("engine")
    if not isinstance(trace, str) or not isinstance(engine, Mapping) or not _is_default(info):
        return ""
    mix = info.get("gpu_mix") or [engine.get("gpu")]
    words = ["forebay", "simulate", trace, "--gpus", info.get("gpus"), "--model"]
    words += [engine.get("model"), "--gpu", "+".join(map(str, mix))]
    if info.get("policy") != DEFAULT_POLICY:
        words += ["--policy", info.get("policy")]
    for option, key, default in OPTIONS:
        if (value := info.get(key)) not in (None, default):
            words += [option, f"{value:.12g}" if isinstance(value, float) else value]
    words += slo_option(info)
    return shlex.join(map(str, [*words, "--out", f"{run.name}-again"]))


def _is_default(info: Mapping[str, Any]) -> bool:
    """True if neither an option of the engine nor the proxy's file was given."""
    from forebay.proxy.config.schema import Config
    from forebay.replay.engine.config import EngineConfig

    engine = info["engine"]
    try:
        plain = asdict(EngineConfig(model=engine["model"], gpu=engine["gpu"]))
    except (KeyError, TypeError, ValueError, InputError):
        return False
    usual = Config().model_dump(mode="json", exclude={"upstream_api_key"})
    same = {name: str(value) for name, value in plain.items()} == dict(engine)
    return same and bool(usual == info.get("proxy"))
