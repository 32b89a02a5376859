"""Find the engine steps behind a measured point: one TTFT, one gap or one batch.

The engine's own scheduler runs, so the simulator has the same chunks, prefix hits and batches.
The duration of a step stays open, because the fit looks for it.
"""

from dataclasses import dataclass, replace

from forebay.replay.engine.calibration.points import Point
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.hardware.specs import GpuSpec, ModelSpec
from forebay.replay.engine.request import EngineRequest
from forebay.replay.engine.timing.step_constants import Calibration
from forebay.replay.engine.timing.step_time import StepTimeModel, StepWork
from forebay.traces.ground.errors import InputError

CHAT_PROMPT, CHAT_OUTPUT = 500, 100_000
BLOCK = 16
LEAST_GAP_SHARE = 0.05
"""Least share of a step that is left of a mean gap after a late first token."""


@dataclass(frozen=True, slots=True)
class PointSteps:
    """The steps of a point.

    Attributes:
        longest: the point is the duration of the longest step, not the sum of all.
        server_tokens: prompt tokens that pass the API server. None if the point is of the engine.
        admitted_tokens: prompt tokens that the engine takes in before the first step, if `longest`.
        decoded_tokens: prompt tokens that the API server decodes before it sends the first token,
            divided by the number of later tokens, which do not wait for that.
    """

    steps: tuple[StepWork, ...]
    longest: bool = False
    server_tokens: int | None = None
    admitted_tokens: int = 0
    decoded_tokens: float = 0.0

    def seconds(self, timing: StepTimeModel) -> float:
        """Return the model's prediction of the point."""
        times = [timing.step_s(work) for work in self.steps]
        if self.longest:
            times[0] += timing.admit_s(self.admitted_tokens)
            return max(times)
        if self.server_tokens is None:
            late_s = timing.calibration.answer_token_s * self.decoded_tokens
            return max(sum(times) - late_s, LEAST_GAP_SHARE * sum(times))
        server_s = timing.calibration.server_times().alone_s(self.server_tokens)
        return sum(times) + timing.admit_s(self.server_tokens) + server_s


class _Recorder(StepTimeModel):
    """Records every step. A step takes no time."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec) -> None:
        super().__init__(model, gpu)
        self.steps: list[StepWork] = []

    def step_s(self, work: StepWork) -> float:
        self.steps.append(replace(work))
        return 0.0


def point_steps(point: Point, model: ModelSpec, gpu: GpuSpec) -> PointSteps:
    """Return the steps behind `point` (InputError: the engine cannot run it)."""
    longest = point.prompt_tokens + point.output_tokens
    if longest > model.max_model_len:
        raise InputError(
            f"line {point.line}: {longest:,} tokens; {model.name} holds {model.max_model_len:,}"
        )
    if point.kind in ("itl", "tpot"):
        return PointSteps((_decode_step(point),), decoded_tokens=_decoded_tokens(point))
    core, recorder = _core(point, model, gpu)
    # A stall: a prompt arrives while a chat decodes. Only the steps from there on count.
    if point.kind == "stall":
        core.add(
            EngineRequest("chat", CHAT_PROMPT, min(CHAT_OUTPUT, model.max_model_len - CHAT_PROMPT))
        )
        while not core.step(0.0).outputs:
            pass
        upload = EngineRequest("upload", point.prompt_tokens, 1)
        core.add(upload)
        recorder.steps.clear()
        while not upload.output_tokens:
            core.step(0.0)
        admitted = point.prompt_tokens
        return PointSteps(tuple(recorder.steps), longest=True, admitted_tokens=admitted)
    # The other kinds: equal requests, after the cached part of their prompts.
    hashes = _warm(core, point) if point.cached_tokens else None
    recorder.steps.clear()
    for number in range(point.batch_size):
        request = EngineRequest(f"r{number}", point.prompt_tokens, point.output_tokens, hashes)
        core.add(request)
    if point.kind == "ttft":
        while not core.step(0.0).outputs:
            pass
        return PointSteps(
            tuple(recorder.steps), server_tokens=point.prompt_tokens if point.text else 0
        )
    while core.has_work:
        core.step(0.0)
    return PointSteps(tuple(recorder.steps))


def _decoded_tokens(point: Point) -> float:
    """Return the prompt tokens that the API server decodes before a first token, for each gap.

    A late first token shortens the mean gap of one request alone.
    """
    gaps = point.output_tokens - 1
    late = point.kind == "tpot" and point.text and point.batch_size == 1
    return point.prompt_tokens / gaps if late and gaps else 0.0


def _core(point: Point, model: ModelSpec, gpu: GpuSpec) -> tuple[EngineCore, _Recorder]:
    longest = point.prompt_tokens + point.output_tokens
    config = EngineConfig(
        model,
        gpu,
        max_model_len=None if point.kind == "stall" else longest,
        max_num_batched_tokens=point.max_num_batched_tokens,
        max_num_seqs=min(point.max_num_batched_tokens, max(16, point.batch_size)),
    )
    core = EngineCore(config)
    core.timing = recorder = _Recorder(model, gpu)
    return core, recorder


def _warm(core: EngineCore, point: Point) -> list[int]:
    """Put the cached part of the prompt into the prefix cache, and return its block hashes."""
    hashes = list(range(1, point.cached_tokens // BLOCK + 1))
    core.add(EngineRequest("warm", max(1, point.cached_tokens), 1, list(hashes)))
    while core.has_work:
        core.step(0.0)
    return hashes


def _decode_step(point: Point) -> StepWork:
    """Return the mean decode step: a step's time is linear in its context."""
    batch = point.batch_size
    context = batch * (point.prompt_tokens + point.output_tokens / 2)
    return StepWork(batch, batch, batch, decode_context=round(context))


def predicted_s(work: PointSteps, model: ModelSpec, gpu: GpuSpec, constants: Calibration) -> float:
    """Return the seconds of `work` under `constants`."""
    return work.seconds(StepTimeModel(model, gpu, constants))
