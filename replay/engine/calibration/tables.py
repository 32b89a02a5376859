"""Read the steps of a model from NVIDIA's measured op tables, which the user has downloaded.

The tables are the folder `aiconfigurator_core` of the package of that name. A row of them is one
kernel of vLLM on an idle GPU. Products are interpolated between the measured sizes, attention is of
the model's own heads. The tables lack the kernels between them (norms, activation), which are
computed from the bytes that they move. They lack the launch of kernels and the API server, too.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.replay.engine.calibration.points import DEFAULT_BATCHED_TOKENS, Point
from forebay.replay.engine.hardware.layers import PLAIN
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.step_time import StepWork
from forebay.traces.ground.errors import InputError

OTHER_NAMES = {"a100_80gb": "a100_sxm"}
"""The tables' names of GPUs that are not ours with `_sxm` at the end."""
NEEDED = {
    "gemm_perf": "gemm",
    "context_attention_perf": "attention",
    "generation_attention_perf": "attention",
}
SMALL_KERNELS = 3
"""Kernels of a layer that the tables lack: two norms and the activation."""
SMALL_KERNEL_S = 3e-6
"""Seconds that each of them takes in addition to its bytes."""
SMALL_SHARE = 0.8
"""Share of the bandwidth that they reach. Both are the values that NVIDIA adds to these tables."""
KERNELS = dict.fromkeys(
    ("gemm_compute", "gemm_bandwidth", "prefill_compute", "decode_bandwidth"), 0.3
)
"""Constants that tables can tell, with their uncertainty in ln."""
LACKED = ("step_s", "graph_launch_s", "eager_launch_s")
"""Constants of a step that tables know nothing of: the CPU's part."""
PROMPTS = (128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
DECODES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 2_048, 8_192)
MOST_CONTEXT = 1 << 19
"""Most tokens of context in a decode step that is fitted, as a GPU's memory holds."""
Curve = tuple[Sequence[float], Sequence[float]]
"""Sizes, ascending, and the seconds of each."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The tables of one GPU of one version of vLLM."""

    gpu: Path
    version: str

    def rows(self, name: str, **equal: Any) -> list[dict[str, Any]]:
        """Return the rows of a table with these values (InputError: it cannot be read)."""
        import pyarrow.parquet

        path = self.gpu / NEEDED[name] / "vllm" / self.version / f"{name}.parquet"
        try:
            table = pyarrow.parquet.read_table(str(path))
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read; download the tables again") from error
        equal = {key: value for key, value in equal.items() if key in table.column_names}
        return [row for row in table.to_pylist() if all(row[key] == equal[key] for key in equal)]


def is_tables(folder: Path) -> bool:
    """Return True for the folder of NVIDIA's tables, also with `systems/data` below it."""
    return _data(folder).is_dir()


def _data(folder: Path) -> Path:
    return folder / "systems" / "data"


class OpTables:
    """Seconds of the kernels of a dense model in 16 bits on one GPU.

    Attributes:
        gpu: the tables' name of the GPU.
        version: vLLM version of the tables.
    """

    def __init__(self, folder: Path, model: ModelSpec, gpu: GpuSpec) -> None:
        """Raise InputError for a GPU or a model that the tables lack."""
        if model.weights != PLAIN or model.mixture or model.latent or model.near_layers:
            raise InputError(
                f"--model {model.name}: only dense models in 16 bits with full attention are "
                "fitted to tables; others have the shipped rates without --calibration"
            )
        place = _place(folder, gpu.name)
        self.gpu, self.version = place.gpu.name, place.version
        self._model = model
        # Products: seconds by rows, for each measured (outputs, inputs).
        products = defaultdict[tuple[int, int], dict[int, float]](dict)
        for row in place.rows("gemm_perf", gemm_dtype="bfloat16"):
            products[row["n"], row["k"]][row["m"]] = row["latency"] / 1e3
        self._products = {shape: _curve(times) for shape, times in products.items()}
        self._outputs, self._inputs = (sorted({*sizes}) for sizes in zip(*products, strict=True))
        # Attention of a prompt alone by its length, of decodes by their number and context.
        sizes = {"num_heads": model.heads, "num_key_value_heads": model.kv_heads}
        sizes |= {"head_dim": model.head_dim, "window_size": 0}
        heads: dict[str, Any] = {"kv_cache_dtype": "bfloat16", **sizes}
        prompts = place.rows("context_attention_perf", **heads, batch_size=1)
        self._prompt = _curve({row["isl"]: row["latency"] / 1e3 for row in prompts})
        decodes = defaultdict[int, dict[int, float]](dict)
        for row in place.rows("generation_attention_perf", **heads):
            decodes[row["batch_size"]][row["isl"] + row["step"]] = row["latency"] / 1e3
        self._decodes = {batch: _curve(decodes[batch]) for batch in sorted(decodes)}
        if not prompts or not decodes:
            raise InputError(
                f"--model {model.name}: the tables of {gpu.name} lack attention of {model.heads} "
                f"heads of {model.head_dim} with {model.kv_heads} of keys; give another model"
            )
        self._byte_s = 1 / (gpu.bandwidth * SMALL_SHARE)

    def step_s(self, work: StepWork) -> float:
        """Return the seconds of a step's kernels. Decodes have equal contexts."""
        model, tokens = self._model, work.tokens
        layer_s = sum(self._product_s(*shape, tokens) for shape in model.linear_shapes)
        layer_s += SMALL_KERNELS * SMALL_KERNEL_S + model.elementwise_bytes * tokens * self._byte_s
        if decodes := work.sequences - len(work.chunks):
            layer_s += self.decode_s(decodes, work.decode_context / decodes)
        layer_s += sum(self.chunk_s(*chunk) for chunk in work.chunks)
        head_s = self._product_s(model.vocab, model.hidden, work.sampled) if work.sampled else 0.0
        return model.layers * layer_s + head_s

    def decode_s(self, batch: int, context: float) -> float:
        """Return the seconds of one layer's attention of decodes with this context each."""
        low = max((size for size in self._decodes if size <= batch), default=1)
        high = min((size for size in self._decodes if size >= batch), default=low)
        times = [_at(self._decodes[size], context, 1) for size in dict.fromkeys((low, high))]
        return _at(((low, high), times), batch, 1) if low < high else times[0] * batch / low

    def chunk_s(self, count: int, offset: int) -> float:
        """Return the seconds of one layer's attention of a chunk behind `offset` tokens.

        The chunk adds its part to the time of the whole prompt. At least it reads all keys and
        values.
        """
        whole_s = _at(self._prompt, offset + count, 2)
        if not offset:
            return whole_s
        added_s = whole_s - _at(self._prompt, offset, 2)
        return max(added_s, _at(self._prompt, count, 2), self.decode_s(1, offset + count))

    def _product_s(self, outputs: int, inputs: int, rows: int) -> float:
        """Return the seconds of a product, between the measured sizes of its matrix."""
        seconds = 0.0
        for wide, share in _neighbours(self._outputs, outputs):
            for deep, part in _neighbours(self._inputs, inputs):
                seconds += share * part * _at(self._products[wide, deep], rows, 1)
        return seconds

    def points(self) -> tuple[Point, ...]:
        """Return the measurements to fit: prompts alone, and steps that only decode."""
        points: list[Point] = []
        for tokens in PROMPTS:
            size = min(tokens, DEFAULT_BATCHED_TOKENS)
            seconds = sum(
                self.step_s(StepWork(size, 1, int(at + size == tokens), chunks=[(size, at)]))
                for at in range(0, tokens, size)
            )
            points.append(Point(len(points) + 1, "offline", seconds, tokens))
        for batch in DECODES:
            for context in CONTEXTS:
                if batch * context <= MOST_CONTEXT:
                    work = StepWork(batch, batch, batch, decode_context=batch * context)
                    line, seconds = len(points) + 1, self.step_s(work)
                    points.append(Point(line, "itl", seconds, context, batch_size=batch))
        return tuple(points)


def _place(folder: Path, gpu: str) -> _Place:
    """Find the newest complete tables of a GPU (InputError: the GPUs that the folder has)."""
    places = {}
    for system in sorted(path for path in _data(folder).iterdir() if path.is_dir()):
        versions = [
            {path.parent.name for path in system.glob(f"{op}/vllm/*/{name}.parquet")}
            for name, op in NEEDED.items()
        ]
        if complete := set.intersection(*versions):
            places[system.name] = _Place(system, max(complete, key=_numbers))
    plain = gpu.replace("-", "_")
    for name in (plain, f"{plain}_sxm", OTHER_NAMES.get(plain, plain)):
        if name in places:
            return places[name]
    raise InputError(f"--gpu {gpu}: {folder} has no tables of it; it has {', '.join(places)}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _curve(times: dict[int, float]) -> Curve:
    sizes = sorted(times)
    return sizes, [times[size] for size in sizes]


def _at(curve: Curve, size: float, power: int) -> float:
    """Interpolate between logarithms. Beyond the last size, seconds grow with a power of it."""
    sizes, times = curve
    if size > sizes[-1]:
        return float(times[-1] * (size / sizes[-1]) ** power)
    return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(times))))


def _neighbours(sizes: Sequence[int], size: int) -> list[tuple[int, float]]:
    """Return the measured sizes around `size`, each with its weight. Beyond the last it grows."""
    if size >= sizes[-1]:
        return [(sizes[-1], size / sizes[-1])]
    high = next(at for at in sizes if at >= size)
    low = max((at for at in sizes if at <= size), default=high)
    if low == high:
        return [(high, 1.0)]
    share = (size - low) / (high - low)
    return [(low, 1 - share), (high, share)]
