"""An engine whose kernels take the times of NVIDIA's op tables: the truth that a fit has to find.

Launches, admission and the API server are the constants that are given.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from forebay.replay.engine.calibration.tables import OpTables
from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.timing.step_time import LARGEST_GRAPH, StepTimeModel, StepWork

CONTEXTS = (1_024, 16_384)
"""Contexts between which a step grows linearly, as the simulator has it."""


class TableTiming(StepTimeModel):
    """Step times of the tables, with the launches of the configuration's constants."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        constants = config.step_constants()
        super().__init__(config.rank_spec, config.gpu_spec, constants, async_scheduling=True)
        self._tables = OpTables(folder, config.rank_spec, config.gpu_spec)
        self._layers = config.rank_spec.layers
        self._steps: dict[tuple[int, int], float] = {}
        self._attention: dict[int, tuple[float, float]] = {}

    def step_s(self, work: StepWork) -> float:
        key = work.tokens, work.sampled
        if key not in self._steps:
            self._steps[key] = self._tables.step_s(StepWork(work.tokens, 0, work.sampled))
        seconds = self._steps[key]
        seconds += self._layers * sum(self._tables.chunk_s(*chunk) for chunk in work.chunks)
        if decodes := work.sequences - len(work.chunks):
            first, more = self._decodes(decodes)
            seconds += first + more * work.decode_context
        if work.chunks:
            small = work.tokens <= LARGEST_GRAPH
            seconds = max(seconds, self._graph_launch_s if small else self._eager_launch_s)
        return seconds

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        first, more = self._decodes(sequences)
        return self.step_s(StepWork(sequences, 0, sequences)) + first, more

    def _decodes(self, count: int) -> tuple[float, float]:
        """Return the seconds of attention of `count` decodes, and of each token of context."""
        if count not in self._attention:
            short, long = (self._layers * self._tables.decode_s(count, at) for at in CONTEXTS)
            more = (long - short) / (count * (CONTEXTS[1] - CONTEXTS[0]))
            self._attention[count] = max(0.0, short - more * count * CONTEXTS[0]), more
        return self._attention[count]


@contextmanager
def engines_of_tables(folder: Path) -> Iterator[None]:
    """Let all engines that are made have the step times of the tables."""
    made: dict[EngineConfig, TableTiming] = {}

    def timing(config: EngineConfig) -> TableTiming:
        if config not in made:
            made[config] = TableTiming(config, folder)
        return made[config]

    with patch.object(EngineConfig, "timing", timing):
        yield
