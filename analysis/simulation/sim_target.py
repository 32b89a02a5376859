"""The target `sim:MODEL@GPU` of `forebay search`: its engine options, and its trials."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.replay.engine.flags import ModelFlags

if TYPE_CHECKING:
    from forebay.analysis.search.cli import SearchArguments
    from forebay.analysis.simulation.sim_trials import SimTrials
    from forebay.replay.plan.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTarget(ModelFlags):
    """vLLM's flags of the simulated engines, as `forebay search` offers them."""

    def trials(self, search: "SearchArguments", slos: "tuple[Slo, ...]") -> "SimTrials":
        """Return the trials of a search, or raise InputError for options that do not fit."""
        from forebay.analysis.experiments.target import sim_config
        from forebay.analysis.simulation.sim_trials import SimTrials
        from forebay.replay.plan.schedule import parse_arrivals
        from forebay.replay.sim.cli import proxy_config
        from forebay.replay.sim.scenario import Scenario

        engine = sim_config(search.target[0], None, **self.of_model())
        if remark := engine.constants_remark():
            print(f"forebay search: {remark}", file=sys.stderr)
        scenario = Scenario(engine, search.gpus, search.policy, proxy_config(search.config))
        return SimTrials(scenario, slos, parse_arrivals(search.arrivals), search.seed)
