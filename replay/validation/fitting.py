"""Fit the sources of a command, print the fit, and write its calibration."""

import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from forebay.replay.engine.calibration.calibrate import PointFit, calibrate, kernel_table
from forebay.replay.engine.calibration.points import DEFAULT_BATCHED_TOKENS, read_points
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags
from forebay.replay.engine.timing.step_constants import (
    Calibration,
    calibration_for,
    read_calibration,
)
from forebay.replay.validation.cli import FitOptions
from forebay.replay.validation.fit_run import RunFit, fit_run
from forebay.replay.validation.measured import is_results, read_measured
from forebay.replay.validation.model_names import check_model
from forebay.replay.validation.output import print_fit, write_calibration
from forebay.traces.ground.errors import InputError


def fit_sources(sources: Sequence[Path], options: FitOptions, flags: EngineFlags) -> bool:
    """Fit, print and write as the options say. False if a time is further off than `within`.

    Raises InputError for bad input, and for a fit that is no calibration.
    """
    out = options.out
    if out is not None and options.hold_out == 1:
        raise InputError(f"--out {out}: --hold-out 1 fits nothing; hold out a smaller share")
    if out is not None and out.exists() and not options.force:
        raise InputError(f"--out {out}: exists; give another name, or --force to overwrite it")
    config = EngineConfig(options.model, options.gpu, **flags.values())
    first = sources[0]
    if options.trace is not None or first.is_dir() or is_results(first):
        done: RunFit | PointFit = _fit_requests(sources, options, config)
    else:
        done = _fit_points(sources, options, config, flags)
    # A poor fit is shown, but not written.
    print_fit(done, as_json=options.as_json)
    for warning in done.warnings():
        print(f"forebay engine: warning: {warning}", file=sys.stderr)
    if (why := done.refusal()) is not None:
        raise InputError(f"{first}: this fit is no calibration: {why}")
    if out is not None:
        write_calibration(done.file, out)
    return options.within is None or abs(done.furthest()[1]) <= options.within


def _prior(options: FitOptions, config: EngineConfig) -> Calibration:
    """Return the constants to begin with. Without a fit they are the engine's own."""
    file = options.calibration
    if options.hold_out == 1:
        return calibration_for(file, config.model_spec.name, config.gpu_spec.name).constants
    return read_calibration(file).constants if file else kernel_table()


def _fit_requests(sources: Sequence[Path], options: FitOptions, config: EngineConfig) -> RunFit:
    measured = read_measured(sources, options.trace)
    check_model(sources, config)
    names = ", ".join(source.name for source in sources)
    replayed = names if options.trace is None else f"{options.trace.name} as replayed in {names}"
    medians = " (medians)" if len(sources) > 1 else ""
    return fit_run(
        measured,
        config,
        _prior(options, config),
        used=f"all {len(measured)} requests of {replayed}{medians}",
        today=_today(),
        hold_out=options.hold_out,
    )


def _fit_points(
    sources: Sequence[Path], options: FitOptions, config: EngineConfig, flags: EngineFlags
) -> PointFit:
    if len(sources) > 1:
        raise InputError(f"{sources[1]}: a second file of points; give one, or run folders")
    points = read_points(sources[0], flags.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS)
    defaults = EngineFlags().values()
    for name, value in flags.values().items():
        if name != "max_num_batched_tokens" and value != defaults.get(name):
            option = name.replace("_", "-")
            raise InputError(f"--{option} describes the server of RUN; leave it out with POINTS")
    return calibrate(
        points,
        config.model_spec,
        config.gpu_spec,
        _prior(options, config),
        used=f"{len(points)} points of {sources[0].name}",
        today=_today(),
        hold_out=options.hold_out,
    )


def _today() -> date:
    return datetime.now(UTC).date()
