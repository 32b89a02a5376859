"""Fit the sources of a command, print the fit, and write its calibration."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from forebay.replay.engine.calibration.calibrate import (
    PointFit,
    calibrate,
    error_text,
    kernel_table,
)
from forebay.replay.engine.calibration.points import DEFAULT_BATCHED_TOKENS, read_points
from forebay.replay.engine.calibration.tables import KERNELS, LACKED, OpTables, is_tables
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags
from forebay.replay.engine.hardware.find import find_gpu, find_model
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.step_constants import (
    CalibrationFile,
    calibration_for,
    read_calibration,
)
from forebay.replay.validation.cli import FitOptions
from forebay.replay.validation.fit_run import RunFit, fit_run
from forebay.replay.validation.measured import is_results, read_measured
from forebay.replay.validation.model_names import check_model
from forebay.replay.validation.output import print_fit, write_calibration
from forebay.replay.validation.proxy_log import is_log, is_trace, read_log
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
    done = _fit(sources, options, flags)
    # A poor fit is shown, but not written.
    print_fit(done, as_json=options.as_json)
    for warning in done.warnings():
        print(f"forebay engine: warning: {warning}", file=sys.stderr)
    if (why := done.refusal()) is not None:
        raise InputError(f"{sources[0]}: this fit is no calibration: {why}")
    if out is not None:
        write_calibration(done.file, out)
    return options.within is None or abs(done.furthest()[1]) <= options.within


def _fit(sources: Sequence[Path], options: FitOptions, flags: EngineFlags) -> RunFit | PointFit:
    """Fit the sources by their kind."""
    first = sources[0]
    if is_tables(first):
        return _fit_tables(sources, options, flags)
    config = EngineConfig(options.model, options.gpu, **flags.values())
    if options.trace is not None or first.is_dir() or is_results(first) or _is_proxys(first):
        return _fit_requests(sources, options, config)
    return _fit_points(sources, options, config, flags)


def _prior(options: FitOptions, model: ModelSpec, gpu: GpuSpec) -> CalibrationFile:
    """Return the constants to begin with: the engine's own unless a file is given."""
    file = options.calibration
    if options.hold_out == 1 or file is None:
        return calibration_for(file, model.name, gpu.name)
    return read_calibration(file)


def _fit_requests(sources: Sequence[Path], options: FitOptions, config: EngineConfig) -> RunFit:
    if _is_proxys(sources[0]) and len(sources) == 1:
        measured = read_log(sources[0], options.trace)
    else:
        measured = read_measured(sources, options.trace)
    check_model(sources, config)
    names = ", ".join(source.name for source in sources)
    replayed = names if options.trace is None else f"{options.trace.name} as replayed in {names}"
    medians = " (medians)" if len(sources) > 1 else ""
    return fit_run(
        measured,
        config,
        _prior(options, config.model_spec, config.gpu_spec).constants,
        used=f"all {len(measured)} requests of {replayed}{medians}",
        today=_today(),
        hold_out=options.hold_out,
    )


def _is_proxys(path: Path) -> bool:
    return is_log(path) or is_trace(path)


def _fit_points(
    sources: Sequence[Path], options: FitOptions, config: EngineConfig, flags: EngineFlags
) -> PointFit:
    if len(sources) > 1:
        raise InputError(f"{sources[1]}: a second file of points; give one, or run folders")
    points = read_points(sources[0], flags.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS)
    _refuse_flags(flags, "max_num_batched_tokens")
    model, gpu = config.model_spec, config.gpu_spec
    own = options.calibration is None and options.hold_out != 1
    return calibrate(
        points,
        model,
        gpu,
        kernel_table() if own else _prior(options, model, gpu).constants,
        used=f"{len(points)} points of {sources[0].name}",
        today=_today(),
        hold_out=options.hold_out,
    )


def _refuse_flags(flags: EngineFlags, *useful: str) -> None:
    """Raise InputError for a flag of a server, of which isolated measurements know nothing."""
    defaults = EngineFlags().values()
    for name, value in flags.values().items():
        if name not in useful and value != defaults.get(name):
            option = name.replace("_", "-")
            raise InputError(f"--{option} describes the server of RUN; leave it out with POINTS")


def _fit_tables(sources: Sequence[Path], options: FitOptions, flags: EngineFlags) -> PointFit:
    """Fit the kernels to op tables. The CPU's part and the API server stay the prior's."""
    folder = sources[0]
    if len(sources) > 1 or options.hold_out:
        raise InputError(f"{folder}: op tables are fitted whole; leave out --hold-out, other files")
    _refuse_flags(flags, "vllm_version")
    model, gpu = find_model(options.model), find_gpu(options.gpu)
    tables = OpTables(folder, model, gpu)
    version = flags.vllm_version
    if tables.version.split(".")[:2] != version.split(".")[:2]:
        print(
            f"forebay engine: warning: the tables are of vLLM {tables.version}, the engine is "
            f"simulated as {version}",
            file=sys.stderr,
        )
    # Fit the kernels alone: without launches, which the tables lack.
    prior = _prior(options, model, gpu)
    none: dict[str, Any] = dict.fromkeys(LACKED, 0.0)
    done = calibrate(
        tables.points(),
        model,
        gpu,
        replace(prior.constants, **none),
        used=f"NVIDIA's op tables of {tables.gpu}, vLLM {tables.version}. They lack launches, the "
        f"CPU and the API server, which are those of {prior.gpu}",
        today=_today(),
        candidates=KERNELS,
    )
    # The lacking parts come back, and the sums are the evidence.
    lacked: dict[str, Any] = {name: getattr(prior.constants, name) for name in LACKED}
    errors = error_text([row["error"] for row in done.file.points])
    file = replace(
        done.file,
        constants=replace(done.file.constants, **lacked),
        checked=f"sums of the tables: {errors}; no served request",
    )
    return replace(done, file=file, prior=prior.constants)


def _today() -> date:
    return datetime.now(UTC).date()
