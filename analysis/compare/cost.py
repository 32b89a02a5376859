"""Compute what a run's tokens cost, from a price of a GPU hour."""

from dataclasses import dataclass

from forebay.analysis.compare.figures import Figures, backends, busy_s
from forebay.analysis.runs.run import RunData
from forebay.traces.errors import InputError

MILLION = 1e6
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Price:
    """A price, in any currency, of one GPU for one hour; `gpus` None: as many as the run says."""

    per_gpu_hour: float
    gpus: int | None = None

    def gpus_of(self, run: RunData) -> int:
        """Return how many GPUs the run paid for.

        Those of a simulation are in its run.json. Other runs count one for each backend.

        Raises:
            InputError: neither is known, and `gpus` is not given.
        """
        known = run.info.get("gpus")
        count = self.gpus or (known if type(known) is int else len(backends(run)))
        if not count:
            raise InputError(
                f"--price-per-gpu-hour: {run.name} does not say how many GPUs it used; give --gpus"
            )
        return count

    def per_million(self, run: RunData, figures: Figures) -> dict[str, float | None]:
        """Return the cost of a million tokens: of all answers, and of those within targets."""
        seconds = busy_s(run)
        if not seconds:
            return {"cost_per_million": None, "cost_per_million_in_time": None}
        paid = self.per_gpu_hour * self.gpus_of(run) * seconds / HOUR_S
        tokens = {
            "cost_per_million": figures.tokens,
            "cost_per_million_in_time": figures.tokens_in_time,
        }
        return {key: paid / count * MILLION if count else None for key, count in tokens.items()}
