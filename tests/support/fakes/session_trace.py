"""Traces of sessions whose turns wait for answers, with sub-agents, for tests."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay.traces.ground.schema import TraceRequest

BLOCK = 64


@dataclass(slots=True)
class Talk:
    """One agent: each turn's prompt is its last prompt, the answer and something new."""

    session: str
    name: str
    root: tuple[int, ...]
    tokens: int
    first_block: int
    turns: int = 0
    rows: list[TraceRequest] = field(default_factory=list)

    def turn(self, at_s: float, output: int, **more: Any) -> TraceRequest:
        own = -(-self.tokens // BLOCK)
        blocks = (*self.root, *range(self.first_block, self.first_block + own))
        row = TraceRequest(
            f"{self.name}-{self.turns}",
            at_s,
            len(self.root) * BLOCK + own * BLOCK,
            output,
            blocks,
            BLOCK,
            session=self.session,
            parent=f"{self.name}-{self.turns - 1}" if self.turns else None,
            **more,
        )
        self.turns += 1
        self.tokens = own * BLOCK + output + 3 * BLOCK
        self.rows.append(row)
        return row


def sessions(
    count: int, turns: int = 5, gap_s: float = 0.5, output: int = 16
) -> Iterator[TraceRequest]:
    """Make sessions that all share an instruction. Every second session starts two sub-agents."""
    rows: list[TraceRequest] = []
    root = tuple(range(10))
    for number in range(count):
        at_s = number * gap_s
        talk = Talk(f"s{number}", f"s{number}", root, 500, 1_000_000 * (number + 1))
        for turn in range(turns):
            more: dict[str, Any] = {"think_s": 0.2 * turn} if turn else {}
            if turn == 3 and number % 2:
                more["waits_for"] = tuple(f"s{number}-helper{index}-1" for index in (0, 1))
            rows.append(talk.turn(at_s, output, **more))
            at_s += 1.0
            if turn == 2 and number % 2:
                for index in (0, 1):
                    first = 1_000_000 * (number + 1) + 100_000 * (index + 1)
                    helper = Talk(f"s{number}", f"s{number}-helper{index}", root, 100, first)
                    waits = {"waits_for": (f"s{number}-2",), "think_s": 0.1}
                    rows += [helper.turn(at_s, 8, **waits), helper.turn(at_s, 8, think_s=0.3)]
    return iter(sorted(rows, key=lambda row: row.arrival_s))
