"""`forebay engine calibrate RUN --trace TRACE`: fit whole replays and print the errors left."""

import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.replay.engine.calibration.calibrate import kernel_table
from forebay.replay.engine.calibration.output import (
    constants_table,
    fit_data,
    new_table,
    write_calibration,
)
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_constants import read_calibration
from forebay.replay.validation.fit_run import FitLine, RunFit, fit_run, hit_ratio
from forebay.replay.validation.measured import Timed, model_of, read_measured
from forebay.traces.command_line.messages import print_json
from forebay.traces.errors import InputError

FAMILIES = ("llama", "qwen", "phi", "mistral", "mixtral", "gemma", "deepseek", "gpt-oss", "glm")


def calibrate_runs(
    runs: Sequence[Path],
    trace: Path | None,
    config: EngineConfig,
    prior: Path | None,
    out: Path | None,
    *,
    hold_out: float,
    as_json: bool,
) -> None:
    """Fit, print and write (InputError: runs of another trace, or a fit that is no calibration)."""
    measured = read_measured(runs, trace)
    check_model(runs, config)
    names = ", ".join(run.name for run in runs)
    of = names if trace is None else f"{trace.name} as replayed in {names}"
    done = fit_run(
        measured,
        config,
        read_calibration(prior).constants if prior else kernel_table(),
        used=f"all {len(measured)} requests of {of}" + (" (medians)" if len(runs) > 1 else ""),
        today=datetime.now(UTC).date(),
        hold_out=hold_out,
    )
    if as_json:
        ratios = {"measured": hit_ratio(done.measured), "model": hit_ratio(done.predicted)}
        print_json({**fit_data(done.file, done.fit), "hit_ratio": ratios})
    else:
        _print(done)
    if (why := done.refusal()) is not None:
        raise InputError(f"{names}: this fit is no calibration: {why}")
    if (why := done.doubt()) is not None:
        print(f"forebay engine: warning: {names}: {why}", file=sys.stderr)
    if out is not None:
        write_calibration(done.file, out)


def check_model(sources: Sequence[Path], config: EngineConfig) -> None:
    """Compare the model that a source says it is of with the configuration's.

    Raises InputError if they differ in family or size. A server can serve a model under any name,
    so other differences are a warning.
    """
    for source in sources:
        named = model_of(source)
        if named is None:
            continue
        both = f"{source}: is of {named}, --model is {config.model_name}"
        if differ(named, config.model_name):
            raise InputError(f"{both}; give the same model")
        if not any(_alike(named, ours) for ours in (config.model_name, config.model_spec.name)):
            print(f"forebay engine: warning: {both}; are they one model?", file=sys.stderr)


def _plain(model: str) -> str:
    return model.lower().rsplit("/config.json", 1)[0].rsplit("/", 1)[-1]


def _alike(*models: str) -> bool:
    """True if one name has all words of the other: Meta-Llama-3-8B-Instruct and llama-3-8b."""
    words, others = ({*re.findall(r"[a-z\d.]+", _plain(model))} for model in models)
    return words <= others or others <= words


def differ(*models: str) -> bool:
    """True if two names of models are of different families, or of different sizes."""
    names = [_plain(model) for model in models]
    families = [{word for word in FAMILIES if word in name} for name in names]
    sizes = [set(re.findall(r"(?<![a-z\d.])(\d+(?:\.\d+)?)b(?![a-z\d])", name)) for name in names]
    return any(all(pair) and pair[0].isdisjoint(pair[1]) for pair in (families, sizes))


def comparison_table(title: str, lines: Sequence[FitLine]) -> Table:
    """Return a table of measured and predicted means and quantiles."""
    numbers = ("requests", "measured", "model", "error", "95 % interval")
    table = new_table(title, *numbers, right=numbers)
    for line in lines:
        table.add_row(
            line.name,
            str(line.requests),
            f"{line.measured_s:#.4g} s",
            f"{line.model_s:#.4g} s",
            f"{line.error:+.1%}",
            f"{line.low:+.1%} to {line.high:+.1%}",
        )
    return table


def hits_text(measured: Sequence[Timed], simulated: Sequence[Timed]) -> str:
    """Describe the shares of prompt tokens that were cached."""
    ratio, model = hit_ratio(measured), hit_ratio(simulated) or 0.0
    measured_text = "not in the file" if ratio is None else f"{ratio:.1%}"
    return f"Prompt tokens cached: measured {measured_text}, simulated {model:.1%}."


def _print(done: RunFit) -> None:
    console = Console(highlight=False)
    console.print(Text(f"{done.file.model} on {done.file.gpu}: {done.file.source}"))
    console.print(comparison_table("fitted requests", done.lines(held_out=False)))
    if held_out := done.lines(held_out=True):
        console.print(comparison_table("held-out requests", held_out))
    console.print(constants_table(done.file.constants, done.prior, done.fit))
    console.print(Text(f"{hits_text(done.measured, done.predicted)} {done.file.checked}."))
