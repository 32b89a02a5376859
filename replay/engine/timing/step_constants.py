"""The constants of the step-time model, and the calibration files that hold them.

A calibration names the measurements it was fitted to and how far it was checked. The shipped ones
lie in `calibration/data/`. `forebay engine fit` writes more and `--calibration` reads them.
`step_time` applies the constants.
"""

import difflib
import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.api_server import ServerTimes
from forebay.traces.ground.errors import InputError

FORMAT = 2
"""Format 1 had other constants: its elementwise kernels were part of the matrix products."""
ANY = "*"
"""The model name of constants for every model on a GPU that has no constants of its own."""
FALLBACK_GPU = "h200-sxm"
SAME_CHIP = {"a100-40gb": "a100-80gb"}
"""GPUs that differ in their memory from a GPU with constants of its own."""
SERVER_TIMES: dict[str, float] = asdict(ServerTimes())
"""The constants of the API server and their values in front of an H200."""


# Published fits of Llama-3.1-70B FP8 on H200 (fp8 KV cache, several GPUs): 12 rows fitted, 48 held
# out, 2.9 % TTFT and 2.5 % TPOT (median). They hold with any calibration.
NARROW_PRODUCT: Final = 0.82
"""FP8 and FP4 products reach this part of the share of 16-bit products: .508 of the FP8 peak,
against .62 of the 16-bit peak for Phi-3-mini fitted in the same form."""
FP8_KV_READ: Final = 0.52
"""An FP8 KV cache is read at this part of the 16-bit share, .46 of .88: half the bytes take as
long."""
GATHERED_BLOCKS: Final = 0.53
"""Part of the chosen keys and values that a query of MiniMax M3's sparse attention reads itself.
It chooses blocks, which neighbours share: H200, prompts of 8k and 32k (op tables, vLLM 0.24)."""
SCAN_S: Final = 49e-9
"""Seconds in which a layer with a recurrent state takes in a token of a prompt, one after another.
Gated DeltaNet with 2 to 64 heads on H200 (op tables, vLLM 0.24). Kimi's takes 73 to 109 ns, and
Mamba-2 was not measured."""
SCAN_NUMBERS: Final = 128 * 128
"""Numbers of a state, one head's, that a multiprocessor updates at a time."""
LINK_SHARE: Final = 0.62
"""Share of a link's bandwidth that an all-reduce reaches: 280 of 450 GB/s."""
GRAPH_LAUNCH_PARALLEL_S: Final = 1.24e-4
EAGER_LAUNCH_PARALLEL_S: Final = 3.67e-4
"""With several GPUs, most CPU seconds to launch a layer, as `graph_launch_s` and `eager_launch_s`:
7.96 and 23.5 ms for prompts of 128 and 1,024 tokens in Qwen3-32B on four B300 (vLLM 0.20.1, golden
runs of ai-dynamo/aiconfigurator), whose GPU work is shorter. On one H200 a layer of Llama-3-8B
takes longer, and its launch hides behind the GPU's work or not: one depth cannot tell."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Unit and physical bounds of one constant. No share of a data sheet exceeds 1."""

    unit: str
    low: float
    high: float


Share = Annotated[float, Constant("share", 0.05, 1.0)]
Seconds = Annotated[float, Constant("s", 0.0, 1.0)]
SmallSeconds = Annotated[float, Constant("s", 0.0, 1e-2)]
ServerSeconds = Annotated[float, Constant("s", 0.0, 10.0)]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Shares of the data sheet's rates that kernels reach, and fixed costs in seconds.

    Attributes:
        gemm_compute: share of peak FLOP/s of large matrix products.
        gemm_bandwidth: share of bandwidth of small ones (weights are read once) and of elementwise
            kernels.
        roofline_power: sharpness of the turn from memory to compute bound.
        prefill_compute: share of peak FLOP/s of prefill attention.
        decode_bandwidth: share of bandwidth of attention that reads keys and values.
        step_s: the CPU's part of a step: scheduling, input preparation and output. Asynchronous
            scheduling hides it behind the GPU's part.
        sequence_s: additional seconds of a step for each sequence.
        chunk_s: additional seconds of a step for each prefill chunk.
        layer_s: fixed seconds of the kernels of one layer.
        graph_launch_s: CPU seconds to launch one layer of a step with prefill chunks, as pieces of
            a CUDA graph.
        eager_launch_s: the same for a step with more tokens than the largest graph.
        admit_s: seconds that the engine stops between two steps to take in a request.
        admit_token_s: the same for each prompt token.
        request_s, receive_token_s, tokenize_token_s, answer_s, answer_token_s, stream_token_s:
            times of the API server, see `ServerTimes`.
        source: origin of the numbers.
    """

    gemm_compute: Share
    gemm_bandwidth: Share
    roofline_power: Annotated[float, Constant("power", 1.0, 20.0)]
    prefill_compute: Share
    decode_bandwidth: Share
    step_s: Seconds
    sequence_s: SmallSeconds
    chunk_s: Annotated[float, Constant("s", 0.0, 1e-1)]
    layer_s: SmallSeconds
    graph_launch_s: SmallSeconds
    eager_launch_s: SmallSeconds
    admit_s: Seconds
    admit_token_s: SmallSeconds
    request_s: ServerSeconds
    receive_token_s: SmallSeconds
    tokenize_token_s: SmallSeconds
    answer_s: ServerSeconds
    answer_token_s: SmallSeconds
    stream_token_s: SmallSeconds
    source: str

    def server_times(self) -> ServerTimes:
        """Return the times of the API server in front of the engine."""
        return ServerTimes(**{name: getattr(self, name) for name in SERVER_TIMES})


CONSTANTS: dict[str, Constant] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Calibration, include_extras=True).items()
    if hint is not str
}
_TEXTS = ("model", "gpu", "date", "source", "checked")
_KEYS = ("format", *_TEXTS, "constants", "fitted", "points")


@dataclass(frozen=True, slots=True)
class CalibrationFile:
    """A calibration with its provenance.

    Attributes:
        model, gpu: model and GPU of the constants. Model `*` is every model.
        date: ISO date of the fit.
        source: origin of the measurements.
        checked: extent of the check: reference, number of held-out rows, error.
        fitted: names of the fitted constants. The others are the prior's.
        points: the measured points with the model's value and their role, as in the file.
    """

    model: str
    gpu: str
    date: str
    source: str
    checked: str
    constants: Calibration
    fitted: tuple[str, ...] = ()
    points: tuple[dict[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        values = asdict(self.constants)
        del values["source"]
        return {
            "format": FORMAT,
            "model": self.model,
            "gpu": self.gpu,
            "date": self.date,
            "source": self.source,
            "checked": self.checked,
            "fitted": list(self.fitted),
            "constants": values,
            "points": list(self.points),
        }


def read_calibration(path: Path) -> CalibrationFile:
    """Read a calibration file. An InputError names the file and the key."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_calibration(raw, str(path))


def parse_calibration(raw: bytes, name: str) -> CalibrationFile:
    """Parse a calibration (InputError: a wrong one). `name` is the file's name in messages."""
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise InputError(f"{name}: not JSON ({error})") from error
    if not isinstance(body, dict):
        raise InputError(f"{name}: not an object; `forebay engine fit -o` makes one")
    _check_keys(body, _KEYS, name, "")
    if body.get("format") != FORMAT:
        raise InputError(
            f"{name}: format is {body.get('format')!r}; this version reads {FORMAT}; "
            "fit the points again with `forebay engine fit`"
        )
    for key in _TEXTS:
        if not isinstance(body.get(key), str):
            raise InputError(f"{name}: {key} is {_shown(body.get(key))}; give text")
    fitted, points = body.get("fitted", []), body.get("points", [])
    for key, value, kind in (("fitted", fitted, str), ("points", points, dict)):
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise InputError(f"{name}: {key} is not a list of {kind.__name__}")
    return CalibrationFile(
        **{key: body[key] for key in _TEXTS},
        constants=_constants(body.get("constants"), name, body["source"]),
        fitted=tuple(fitted),
        points=tuple(points),
    )


def _constants(values: Any, name: str, source: str) -> Calibration:
    if not isinstance(values, dict):
        raise InputError(f"{name}: constants is {_shown(values)}; give an object")
    _check_keys(values, tuple(CONSTANTS), name, "constants.")
    for key, allowed in CONSTANTS.items():
        value = values.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not allowed.low <= value <= allowed.high
        ):
            raise InputError(
                f"{name}: constants.{key} is {_shown(value)}; give a number from "
                f"{allowed.low:g} to {allowed.high:g} ({allowed.unit})"
            )
    return Calibration(**{key: float(values[key]) for key in CONSTANTS}, source=source)


def _check_keys(body: dict[str, Any], keys: tuple[str, ...], name: str, before: str) -> None:
    for key in body:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(keys)}"
            raise InputError(f"{name}: {before}{key}: unknown key{hint}")


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:60]


@lru_cache(1)
def shipped() -> tuple[CalibrationFile, ...]:
    """Return the calibrations of this package, first the files of a named model."""
    folder = files("forebay.replay.engine.calibration") / "data"
    calibrations = [
        parse_calibration(entry.read_bytes(), entry.name)
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    ]
    return tuple(sorted(calibrations, key=lambda file: (file.model == ANY, file.model, file.gpu)))


def calibration_of(model: ModelSpec, gpu: GpuSpec) -> Calibration:
    """Return the shipped constants of a model on a GPU, or else the nearest GPU's."""
    return calibration_file_of(model.name, gpu.name).constants


def calibration_file_of(model: str, gpu: str) -> CalibrationFile:
    """Return the shipped calibration nearest to `model` on `gpu`, with its provenance."""
    by_key = {(file.model, file.gpu): file for file in shipped()}
    nearest = SAME_CHIP.get(gpu, FALLBACK_GPU)
    for key in ((model, gpu), (ANY, gpu), (ANY, nearest)):
        if key in by_key:
            return by_key[key]
    raise LookupError(f"no calibration is shipped for {FALLBACK_GPU}")


def calibration_for(source: Path | Calibration | None, model: str, gpu: str) -> CalibrationFile:
    """Return the constants of a file, or as they are, or the shipped ones (None).

    Raises InputError if the file is bad or of another model or GPU.
    """
    if source is None:
        return calibration_file_of(model, gpu)
    if isinstance(source, Calibration):
        return CalibrationFile(model, gpu, "", source.source, "", source)
    read = read_calibration(source)
    if read.model not in (ANY, model) or read.gpu != gpu:
        raise InputError(
            f"--calibration {source}: is for {read.model} on {read.gpu}, not for {model} on {gpu}"
        )
    return read


def measured_elsewhere(file: CalibrationFile, gpu: str) -> str | None:
    """Return a remark if the constants of `file` were not measured on `gpu`, else None."""
    return None if file.gpu == gpu else f"constants measured on {file.gpu}; not on {gpu}"
