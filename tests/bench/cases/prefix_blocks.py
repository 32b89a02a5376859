"""Simulate a case with prefixes in blocks of the proxy's size, in place of the trace's."""

from dataclasses import replace

from case_list import Case
from case_traces import BLOCK, Rows
from play import FOREBAY, scenario

from forebay.proxy.core.model import Request
from forebay.replay.sim.fleet import Fleet, SimOutcome
from forebay.traces.ground.schema import TraceRequest


class InBlocks(Fleet):
    """A fleet whose policy sees prefixes in blocks of `tokens`, its engines the trace's blocks."""

    tokens = BLOCK

    def _asked(self, row: TraceRequest, timeout_s: float) -> Request:
        ids = row.blocks or ()
        ends = range(self.tokens, row.input_tokens + 1, self.tokens)
        known = tuple(ids[-(-end // row.block_tokens) - 1] for end in ends)
        seen = replace(row, blocks=(*known, *ids[-1:]), block_tokens=self.tokens)
        return super()._asked(seen, timeout_s)


def play_in_blocks(case: Case, rows: Rows, tokens: int) -> list[SimOutcome]:
    """Play Forebay with its defaults, and prefixes in blocks of `tokens`, at least BLOCK."""
    simulated = scenario(case, FOREBAY, False, None)
    engines = simulated.new_engines()
    fleet = InBlocks(simulated.new_policy(list(engines)), engines)
    fleet.tokens = tokens
    return fleet.run(rows)
