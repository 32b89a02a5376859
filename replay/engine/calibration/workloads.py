"""What the scheduler makes of a measured point: the steps behind one TTFT, gap or batch.

The engine's own scheduler runs, so chunks, prefix hits and batches are those of the simulator;
only the price of a step is left open, because that is what a fit looks for.
"""

from dataclasses import dataclass, replace

from forebay.replay.engine.calibration.constants import Calibration
from forebay.replay.engine.calibration.points import Point
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.engine import EngineCore
from forebay.replay.engine.hardware.models import GpuSpec, ModelSpec
from forebay.replay.engine.request import Request
from forebay.replay.engine.step_time import StepTimeModel, StepWork
from forebay.traces.errors import InputError

CHAT_PROMPT, CHAT_OUTPUT = 500, 100_000
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """The steps of a point; `longest`: the point is the longest of them, not their sum."""

    steps: tuple[StepWork, ...]
    longest: bool = False
    over_http: bool = False

    def seconds(self, timing: StepTimeModel) -> float:
        """What the model says the point should read."""
        times = [timing.step_s(work) for work in self.steps]
        if self.longest:
            return max(times)
        return sum(times) + (timing.request_s if self.over_http else 0.0)


class _Recorder(StepTimeModel):
    """Notes every step and calls it instant."""

    def __init__(self, model: ModelSpec, gpu: GpuSpec) -> None:
        super().__init__(model, gpu)
        self.steps: list[StepWork] = []

    def step_s(self, work: StepWork) -> float:
        self.steps.append(replace(work))
        return 0.0


def workload(point: Point, model: ModelSpec, gpu: GpuSpec) -> Workload:
    """The steps behind `point`; raises InputError when the engine cannot run it."""
    longest = point.prompt_tokens + point.output_tokens
    if longest > model.max_model_len:
        raise InputError(
            f"line {point.line}: {longest:,} tokens; {model.name} holds {model.max_model_len:,}"
        )
    if point.kind in ("itl", "tpot"):
        return Workload((_decode_step(point),))
    core, recorder = _core(point, model, gpu)
    if point.kind == "stall":
        core.add(Request("chat", CHAT_PROMPT, min(CHAT_OUTPUT, model.max_model_len - CHAT_PROMPT)))
        while not core.step(0.0).outputs:
            pass
        upload = Request("upload", point.prompt_tokens, 1)
        core.add(upload)
        recorder.steps.clear()
        while not upload.output_tokens:
            core.step(0.0)
        return Workload(tuple(recorder.steps), longest=True)
    hashes = _warm(core, point) if point.cached_tokens else None
    recorder.steps.clear()
    for number in range(point.batch_size):
        request = Request(f"r{number}", point.prompt_tokens, point.output_tokens, hashes)
        core.add(request)
    if point.kind == "ttft":
        while not core.step(0.0).outputs:
            pass
        return Workload(tuple(recorder.steps), over_http=True)
    while core.has_work:
        core.step(0.0)
    return Workload(tuple(recorder.steps))


def _core(point: Point, model: ModelSpec, gpu: GpuSpec) -> tuple[EngineCore, _Recorder]:
    config = EngineConfig(
        model,
        gpu,
        max_num_batched_tokens=point.max_num_batched_tokens,
        max_num_seqs=min(point.max_num_batched_tokens, max(16, point.batch_size)),
    )
    core = EngineCore(config)
    core.timing = recorder = _Recorder(model, gpu)
    return core, recorder


def _warm(core: EngineCore, point: Point) -> list[int]:
    """Put the cached part of the prompt into the prefix cache; the hashes that find it again."""
    hashes = list(range(1, point.cached_tokens // BLOCK + 1))
    core.add(Request("warm", max(1, point.cached_tokens), 1, list(hashes)))
    while core.has_work:
        core.step(0.0)
    return hashes


def _decode_step(point: Point) -> StepWork:
    """The mean decode step: its time is linear in the context, so it has the mean context."""
    batch = point.batch_size
    context = batch * (point.prompt_tokens + point.output_tokens / 2)
    return StepWork(batch, batch, batch, decode_context=round(context))


def predicted_s(work: Workload, model: ModelSpec, gpu: GpuSpec, constants: Calibration) -> float:
    """Seconds of `work` under `constants`."""
    return work.seconds(StepTimeModel(model, gpu, constants))
