"""Check a configuration file, the files that it names, and whether the running proxy uses it."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from forebay.proxy.config.backends import lanes
from forebay.proxy.config.contradictions import contradictions
from forebay.proxy.config.schema import Config
from forebay.proxy.config.sources import load_config
from forebay.proxy.diagnose.doctor.finding import Finding, Found, Severity
from forebay.proxy.diagnose.scene import Scene
from forebay.proxy.security.guards import Security
from forebay.proxy.security.keys import SHORT_KEY
from forebay.proxy.telemetry.logs.capture import capture_salt
from forebay.traces.ground.errors import InputError

CHECK = "configuration file"
LEAST_FREE = 0.05  # free share of a disk that is written to
READABLE = 0o044  # mode bits that let other users than the owner read


def examine_file(path: Path, environ: Mapping[str, str], scene: Scene) -> list[Finding]:
    """Return the faults of the file, of files that it names, and its differences to the proxy."""
    try:
        config = load_config(path, {}, environ, to_serve=False)
        faults = _files(config, environ)
    except InputError as error:
        return [Finding(CHECK, "error", str(error), "correct it; the running proxy keeps its own")]
    return [Finding(CHECK, *fault) for fault in (*faults, *_running(config, scene))]


def check_files(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return warnings. Raises InputError if a file that the configuration names cannot be used."""
    faults, warnings = _files(config, environ), []
    if config.capture.path is not None:
        capture_salt(environ)
    for severity, text, remedy in faults:
        if severity == "error":
            raise InputError(f"{text}; {remedy}")
        warnings.append(f"{text}; {remedy}")
    return warnings


def _files(config: Config, environ: Mapping[str, str]) -> list[tuple[Severity, str, str]]:
    """Check the files that the configuration names. Raises InputError for a bad key or secret."""
    security = Security(config, environ)
    ring, clashes = security.auth.ring, contradictions(config, security.auth.tenants())
    return [
        *_key_file(config, ring.short_keys if ring else 0),
        *(("warning", *contradiction) for contradiction in clashes),
        *_disks(config),
    ]


def _key_file(config: Config, short_keys: int) -> Found:
    source = config.tenants.keys
    if short_keys:
        text = f"{short_keys} API keys are shorter than {SHORT_KEY} characters: can be guessed"
        yield "warning", text, "replace them by longer ones, e.g. `openssl rand -hex 32`"
    if source and not source.startswith("env:") and os.name == "posix":
        mode = Path(source).stat().st_mode & 0o777
        if mode & READABLE:
            text = f"tenants.keys: {source} can be read by other users (mode {mode:o})"
            yield "warning", text, f"chmod 600 {source}"


def _disks(config: Config) -> Found:
    written = {
        "capture.path": config.capture.path,
        "metrics.hlog": config.metrics.hlog,
        "usage.path": config.usage.path,
    }
    for key, path in written.items():
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            yield "error", f"{key}: there is no folder {folder}", "make it"
            continue
        if not os.access(folder, os.W_OK):
            yield "error", f"{key}: the folder {folder} cannot be written to", "chmod or chown it"
        usage = shutil.disk_usage(folder)
        if usage.free < LEAST_FREE * usage.total:
            text = f"{key}: {usage.free / usage.total:.0%} of the disk of {folder} is free"
            yield "warning", text, "make room"


def _running(config: Config, scene: Scene) -> Found:
    running = scene.backends()
    in_file = {lane.name: lane for backend in config.backends for lane in lanes(backend)}
    for name in in_file.keys() - running.keys():
        yield "warning", f"the file has backend {name}; the running proxy has not", "reload it"
    for name in running.keys() - in_file.keys() if in_file else ():
        yield "warning", f"the running proxy has backend {name}; the file has not", "reload it"
    for name in in_file.keys() & running.keys():
        here, there = in_file[name], running[name]
        for key in ("max_concurrency", "long_prefill_token_threshold", "scheduler"):
            if getattr(here, key) != there[key]:
                text = f"{key} of {name} is {getattr(here, key)} in the file, {there[key]} in force"
                yield "warning", text, "reload the proxy"
