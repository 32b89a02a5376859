"""Studies of a single server: prompts alone, batches that decode, and the roofline of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import typer

from forebay.analysis.experiments.result import Row
from forebay.analysis.experiments.study import Study, integers
from forebay.analysis.experiments.target import Ask, MeasuredAnswer, StudyFailed, StudyTarget
from forebay.replay.engine.timing.roofline import bound_by, least
from forebay.replay.engine.timing.step_time import StepWork
from forebay.traces.ground.errors import InputError

LEAST_LENGTHS = 3  # the curve of a prefill has three terms


@dataclass(kw_only=True)
class ServerStudy(Study):
    """A study whose loads go to one server, which stays open."""

    SETTINGS = ("repeats",)

    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each load; the median is reported.")
    ] = 3
    server: StudyTarget = field(init=False)

    async def open_server(self) -> None:
        self.server = await self.open(self.target)
        self.measured = self.server.about.name

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"salt": self.server.about.salt}

    async def open_for(self, lengths: str) -> list[int]:
        """Open the server and return the prompt lengths that fit. Raises InputError."""
        tokens = integers(lengths, "--lengths")
        if len(tokens) < LEAST_LENGTHS:
            raise InputError(f"--lengths {lengths}: give {LEAST_LENGTHS} lengths or more")
        await self.open_server()
        context = self.server.about.context
        usable = [n for n in tokens if context is None or n < context]
        if len(usable) < LEAST_LENGTHS:
            raise InputError(
                f"--lengths: only {len(usable)} of them fit in the context of {context:,} "
                f"tokens; give {LEAST_LENGTHS} or more that do"
            )
        if left_out := len(tokens) - len(usable):
            self.note(f"{left_out} lengths were skipped: longer than {context:,} tokens")
        return usable

    async def prefilled(self, tokens: int) -> Row:
        """Send prompts of this length, one at a time. Return medians over the repeats."""
        answers = []
        for number in range(self.repeats):
            answers += await self.server.run([Ask(f"prompt of {tokens}, {number}", tokens, 1)])
        times = [answer.ttft_s for answer in answers]
        return {
            "prompt_tokens": round(median(answer.prompt_tokens for answer in answers)),
            "cached_tokens": max(answer.cached_tokens for answer in answers),
            "ttft_s": median(times),
            "lowest_s": min(times),
            "highest_s": max(times),
        }

    async def decoded(self, batch: int, output: int, prompt_tokens: int) -> Row:
        """Send a batch at once. Return medians over its requests and the repeats."""
        seen = []
        for number in range(self.repeats):
            names = [f"batch of {batch}, {number}.{i}" for i in range(batch)]
            asks = [Ask(name, prompt_tokens, output) for name in names]
            seen.append(_medians(await self.server.run(asks)))
        row: Row = {"batch": batch, "output_tokens": output}
        for key in ("tpot_s", "steady_itl_s", "e2e_s"):
            values = [value for measured in seen if (value := measured[key]) is not None]
            row[key] = median(values) if values else None
        return row

    def reached(self, work: StepWork, seconds: float, *keys: str) -> Row:
        """Return figures `keys` of a step on the roofline, none without the data sheets."""
        about = self.server.about
        if about.model is None or about.gpu is None:
            return {}
        floor = least(about.model, about.gpu, [work])
        figures = {
            "flop_per_byte": floor.flops / floor.bytes,
            "flop_per_s": floor.flops / seconds,
            "peak_share": floor.compute_s / seconds,
            "bandwidth_share": floor.memory_s / seconds,
            "bound": bound_by(floor, seconds),
        }
        return {key: figures[key] for key in keys}

    def note_warm(self, rows: Sequence[Row]) -> None:
        """Note that some prefills were not cold."""
        warm = any(row["cached_tokens"] for row in rows)
        self.note("the server reports prefix cache hits: some prefills were not cold", when=warm)


def prefill_work(tokens: int) -> StepWork:
    """The step of a whole prompt alone."""
    return StepWork(tokens, 1, 1, chunks=[(tokens, 0)])


def decode_work(batch: int, context: int) -> StepWork:
    """A step of a batch, each request with `context` tokens."""
    return StepWork(batch, batch, batch, decode_context=batch * context)


def _medians(answers: Sequence[MeasuredAnswer]) -> dict[str, float | None]:
    """Medians over the requests of a load. ITL counts only while all of them decode."""
    tpots, e2es, gaps = [], [], list[float]()
    for answer in answers:
        _ = answer.ttft_s  # raises StudyFailed if it was not answered
        if answer.latency.tpot_s is None or answer.latency.e2e_service_s is None:
            raise StudyFailed(f"{answer.ask.name}: fewer tokens than requested")
        tpots.append(answer.latency.tpot_s)
        e2es.append(answer.latency.e2e_service_s)
    first = max(answer.events_s[0] for answer in answers)
    last = min(answer.events_s[-1] for answer in answers)
    for answer in answers:
        gaps += [b - a for a, b in pairwise(answer.events_s) if a >= first and b <= last]
    return {
        "tpot_s": median(tpots),
        "e2e_s": median(e2es),
        # The mean, because the median halves when two tokens arrive in one read.
        "steady_itl_s": sum(gaps) / len(gaps) if gaps else None,
    }
