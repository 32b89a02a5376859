"""Errors of step times against served runs, for models that no calibration was made on.

The runs are closed loops of InferenceMAX and others in aiconfigurator-core 0.12.0
(`systems/silicon_sample.csv`), of vLLM 0.12 to 0.19. `tests/replay/engine/timing/test_kernels.py`
plays a part of them again.
"""

from dataclasses import dataclass

from forebay.replay.engine.hardware.layers import PLAIN
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.timing.kernels import BLACKWELL, HOPPER, Kernels, kernels_of

FAR_RUNS = 1 / 3
"""Share of runs whose time per token is more than 15 % off. Above it an answer says so at once."""


@dataclass(frozen=True, slots=True)
class ServedRuns:
    """Median errors over served runs of one kind of model. Minus: simulated times are too short.

    Attributes:
        weights: format of the weights.
        kernels: the generation of GPUs.
        model: the models, as a message names them.
        runs: number of runs.
        far: number of runs whose time per token is more than 15 % off.
        tpot, ttft: errors of the mean time per token, and of the mean time to first token.
        experts: the models are mixtures of experts.
        family: `model_type` of models that alone are meant. Empty: all families.
    """

    weights: str
    kernels: Kernels
    model: str
    runs: int
    far: int
    tpot: float
    ttft: float
    experts: bool = True
    family: str = ""

    def __str__(self) -> str:
        return (
            f"{self.far} of {self.runs} served runs of {self.model} are more than 15 % off; "
            f"medians: time per token {self.tpot:+.0%}, to first token {self.ttft:+.0%}"
        )


SERVED = (
    ServedRuns("bf16", HOPPER, "Mixtral-8x7B", 2, 0, 0.02, -0.01),
    ServedRuns("mxfp4", HOPPER, "gpt-oss-120b", 33, 1, -0.03, -0.26),
    ServedRuns("mxfp4", BLACKWELL, "gpt-oss-120b", 12, 2, 0.01, -0.01),
    ServedRuns("fp8 block", HOPPER, "MiniMax-M2.5", 10, 0, 0.0, -0.27, family="minimax_m2"),
    ServedRuns("fp8 block", HOPPER, "Qwen3-235B-A22B-FP8", 19, 9, -0.13, -0.14),
    ServedRuns("fp8 block", BLACKWELL, "MiniMax-M2.5", 27, 5, -0.01, -0.17),
    ServedRuns("nvfp4", BLACKWELL, "Kimi-K2.5 and MiniMax-M2.5", 36, 17, -0.13, -0.12),
    ServedRuns("int4", HOPPER, "Kimi-K2.5", 10, 0, 0.03, -0.07),
    ServedRuns("int4", BLACKWELL, "Kimi-K2.5", 10, 6, -0.18, -0.16),
    ServedRuns("fp8", HOPPER, "Llama-3.1-70B", 21, 4, -0.05, 0.0, experts=False),
)


def served_runs_of(model: ModelSpec, gpu: GpuSpec) -> ServedRuns | None:
    """Return the served runs of such models on this generation of GPUs."""
    weights = f"{model.weights.name}{' block' if model.weights.block else ''}"
    kind = (weights, model.mixture is not None)
    for runs in SERVED:
        alike = (runs.weights, runs.experts) == kind and runs.kernels is kernels_of(gpu)
        if alike and runs.family in ("", model.family):
            return runs
    return None


def checked_by_runs(model: ModelSpec, gpu: GpuSpec) -> str | None:
    """Return the served runs that judge a model, or that there are none, as one sentence.

    None for a dense model in 16 bits, which the checks of the calibrations are about.
    """
    if model.weights == PLAIN and model.mixture is None:
        return None
    runs = served_runs_of(model, gpu)
    if runs is not None:
        return f"known error: {runs}" if runs.far > FAR_RUNS * runs.runs else str(runs)
    kind = "a mixture of experts" if model.mixture is not None else "a dense model"
    return f"unchecked: no served run of {kind} in {model.weights.name} on such a GPU"


def known_error(model: ModelSpec, gpu: GpuSpec) -> str | None:
    """Return the error of a model's step times, or that it is unknown. None: small enough."""
    words = checked_by_runs(model, gpu)
    return words if words and words.startswith(("known", "unchecked")) else None
