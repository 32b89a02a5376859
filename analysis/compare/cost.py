"""Compute the cost of a run's tokens from the price of a GPU hour."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.analysis.compare.figures import TOKENS, backends, busy_s, good_rows, recorded_slos
from forebay.analysis.runs.run import RunData
from forebay.replay.plan.slo import Slo
from forebay.traces.ground.errors import InputError

MILLION = 1e6
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Price:
    """A price, in any currency, of a GPU for an hour. `gpus` None takes the number from the run."""

    per_gpu_hour: float
    gpus: int | None = None

    def gpus_of(self, run: RunData) -> int:
        """Return the number of GPUs that the run paid for.

        A simulation records them in its run.json. Other runs count one for each backend.

        Raises:
            InputError: neither is known, and `gpus` is not given.
        """
        gpu_count = run.info.get("gpus")
        count = self.gpus or (gpu_count if type(gpu_count) is int else len(backends(run)))
        if not count:
            raise InputError(
                f"--price-per-gpu-hour: {run.name} does not say how many GPUs it used; give --gpus"
            )
        return count

    def per_million(self, run: RunData, slos: Sequence[Slo] = ()) -> dict[str, float | None]:
        """Return the cost of a million tokens: of all answers, and of answers within targets.

        The targets are `slos`, else the recorded targets of the run.
        """
        rows = {
            "cost_per_million": run.rows(outcome="ok"),
            "cost_per_million_in_time": good_rows(run, slos or recorded_slos(run)),
        }
        seconds = busy_s(run)
        if not seconds:
            return dict.fromkeys(rows)
        paid = self.per_gpu_hour * self.gpus_of(run) * seconds / HOUR_S
        tokens = {key: _tokens(run, mask) for key, mask in rows.items()}
        return {key: paid / count * MILLION if count else None for key, count in tokens.items()}


def _tokens(run: RunData, rows: NDArray[np.bool_]) -> float:
    """Prompt and output tokens of some requests, as the server counted them."""
    return sum(float(np.nansum(run.numbers[name][rows])) for name in TOKENS)
