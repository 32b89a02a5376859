"""Search the highest load that meets the targets, one trial after another, and keep each trial.

The loads lie on a grid whose neighbours differ by `resolution`. At a load, parts of the trace are
measured until the share of good requests is surely above or surely below `wanted`, or all parts
are measured. Every part is kept in `trials.jsonl` when it ends, so a search that was stopped
goes on where it was.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import orjson

from forebay.analysis.search.bracket import Bracket, bracket
from forebay.analysis.search.evidence import WARM_UP_SHARE, Evidence, pooled_evidence, z_of_looks
from forebay.analysis.search.trial import TrialMaker, TrialRow
from forebay.replay.plan.slo import SESSION, Slo
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.whole_file import json_bytes, whole_file

TRIALS, QUESTION, RESULT = "trials.jsonl", "search.json", "result.json"
WIDEST = 1024.0
"""A search gives up when every load from its start to this many times more, or less, is alike."""
LEAST_GIVEN_UP = 8
"""Parts of a load after which it is given up if the rest could not decide it either."""
MOST_TOLD = 1e7
TARGETS_OF_PART = 20.0
"""A part lasts at least this multiple of the longest latency target. Work that arrives faster than
it is done waits longer and longer: 5 % too much is a target late after 20 targets, not before."""


def least_part_s(slos: Sequence[Slo], buckets: Collection[str]) -> float:
    """Return the least duration of a part, by the targets of the buckets in use."""
    limits = [
        slo.limit_s
        for slo in slos
        if slo.metric in ("ttft", "e2e", SESSION) and (slo.bucket is None or slo.bucket in buckets)
    ]
    return TARGETS_OF_PART * max(limits, default=0.0)


def users_per_load(rows: Sequence[TraceRequest]) -> float | None:
    """Return the mean time between two requests of a session, or None without such sessions.

    By Little's law, a load of L requests a second then has L times as many sessions at once.
    """
    spans: dict[str, tuple[float, float, int]] = {}
    for row in rows:
        if row.session is not None:
            first, _, turns = spans.get(row.session, (row.arrival_s, 0.0, 0))
            spans[row.session] = first, row.arrival_s, turns + 1
    gaps = sum(turns - 1 for _, _, turns in spans.values())
    seconds = sum(last - first for first, last, turns in spans.values() if turns > 1)
    return seconds / gaps if gaps and seconds else None


@dataclass(frozen=True, slots=True)
class SearchQuestion:
    """The question of a search, without the way to measure it.

    Attributes:
        wanted: share of the requests that must meet their targets.
        resolution: ratio of neighbouring loads, less 1.
        part_rows: requests of a part; the trace is used part after part, and again from its start.
        most_parts: parts at one load, a power of two: it is decided after 1, 2, 4, ... of them.
        start_per_s: the load to try first.
        least_s: a part has more requests if it were shorter than this (`least_part_s`).
        repeats: True if the same rows are new evidence, because their times are drawn again.
        users: sessions at once for each request a second (`users_per_load`).
        copied: requests of the trace, if copies of it were added that share none of its prompts,
            though its own sessions share some.
    """

    rows: Sequence[TraceRequest] = field(repr=False)
    wanted: float
    resolution: float
    part_rows: int
    most_parts: int
    start_per_s: float
    least_s: float = 0.0
    repeats: bool = True
    users: float | None = None
    copied: int = 0

    @property
    def z(self) -> float:
        """The quantile for the possible looks at a load: a short trace has few parts."""
        return z_of_looks(self.parts_at(0.0).bit_length())

    @property
    def least_part_rows(self) -> int:
        """The fewest requests of a single part that prove a load if all meet their targets."""
        judged = math.ceil(z_of_looks(1) ** 2 * self.wanted / (1 - self.wanted))  # Wilson interval
        return next(rows for rows in count(judged) if _judged(rows) >= judged)

    def can_prove(self) -> bool:
        """True if a load at which no request misses its targets would be proven."""
        judged = self.parts_at(0.0) * _judged(self._size(0.0))
        return Evidence(judged, judged, judged).decides(self.wanted, self.z) is True

    def part(self, number: int, load: float) -> Sequence[TraceRequest]:
        """Return the rows of a part."""
        size = self._size(load)
        first = number % max(1, len(self.rows) // size) * size
        return self.rows[first : first + size]

    def parts_at(self, load: float) -> int:
        """Return the largest number of parts, a power of two, that a load may be measured with."""
        if self.repeats:
            return self.most_parts
        parts = min(self.most_parts, max(1, len(self.rows) // self._size(load)))
        return 1 << (parts.bit_length() - 1)

    def too_short(self, load: float) -> bool:
        """True if the whole trace is over too soon at a load to prove that it can be kept."""
        return len(self.rows) < int(load * self.least_s)

    def _size(self, load: float) -> int:
        return min(len(self.rows), max(self.part_rows, math.ceil(load * self.least_s)))

    def load(self, index: int) -> float:
        """Return the load at a place of the grid, requests a second with 4 digits."""
        return float(f"{(1 + self.resolution) ** index:.4g}")

    def index(self, rate_per_s: float) -> int:
        return round(math.log(rate_per_s, 1 + self.resolution))


class LoadSearch:
    """One search. `trials` are kept in `folder` unless it is None."""

    def __init__(
        self,
        question: SearchQuestion,
        maker: TrialMaker,
        folder: Path | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.question = question
        self.trials: dict[float, list[TrialRow]] = {}
        self.ran = 0
        self._maker = maker
        self._folder = folder
        self._told = report

    def resume(self, about: Mapping[str, Any], *, force: bool = False) -> int:
        """Read the trials of an earlier search with the same question. Returns their number.

        Args:
            about: the question as it is stored with the trials.
            force: forget a search with another question.

        Raises:
            InputError: the folder holds another search, or it cannot be read or written.
        """
        if self._folder is None:
            return 0
        trials, question = self._folder / TRIALS, self._folder / QUESTION
        text = json_bytes(about)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if trials.exists() and question.exists():
                if not force and question.read_bytes() != text:
                    raise InputError(
                        f"--out: {self._folder} holds a search with another question "
                        f"({', '.join(_differences(question.read_bytes(), about))}); name another "
                        "folder, or give --force to start anew"
                    )
                if not force:
                    for line in trials.read_bytes().splitlines():
                        self._add(TrialRow(**orjson.loads(line)))
                    return sum(map(len, self.trials.values()))
            trials.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"--out: {self._folder} cannot be used ({error.strerror})") from error
        except (orjson.JSONDecodeError, TypeError) as error:
            raise InputError(f"{trials}: damaged ({error}); give --force to start anew") from error
        with whole_file(question) as file:
            file.write(text)
        return 0

    def run(self) -> Bracket:
        """Search. Returns the bracket as places of the grid.

        One part a load first shows roughly where the answer is: a proof that a load can be kept
        takes many parts, and most loads on the way from the start are not worth it.
        """
        question = self.question
        start, reach = question.index(question.start_per_s), question.index(WIDEST)
        least, most = start - reach, start + reach
        guess = bracket(self.seems_to_pass, start, least, most).low
        return bracket(self.passes, guess, least, most)

    def measure_curve(self, loads: Sequence[float]) -> None:
        """Measure one part of each load, without a search."""
        for load in loads:
            if load not in self.trials:
                self._measure(load)

    def seems_to_pass(self, index: int) -> bool:
        load = self.question.load(index)
        if load not in self.trials:
            self._measure(load)
        return self.evidence(load, 1).share >= self.question.wanted

    def passes(self, index: int) -> bool | None:
        """Measure 1, 2, 4, ... parts of a load until they decide it.

        Returns None if all parts leave it open, or can be expected to.
        """
        question, load = self.question, self.question.load(index)
        parts, most_parts = 1, question.parts_at(load)
        while parts <= most_parts:
            while len(self.trials.get(load, ())) < parts:
                self._measure(load)
            verdict = self.decided(load, parts)
            if verdict is not None:
                return verdict
            if LEAST_GIVEN_UP <= parts < most_parts and self._hopeless(load, parts, most_parts):
                return None
            parts *= 2
        return None

    def _hopeless(self, load: float, parts: int, most_parts: int) -> bool:
        """True if all parts would leave a load open, were the rest like the measured parts."""
        so_far, question = self.evidence(load, parts), self.question
        needed = so_far.requests_to_decide(question.wanted, question.z)
        if needed <= so_far.count * most_parts / parts:
            return False
        takes = f"it takes about {needed:,.0f}" if needed <= MOST_TOLD else "no number of them does"
        self._told(
            f"{load:g}/s: given up, as {so_far.share:.2%} is too near {question.wanted:.2%} for "
            f"{so_far.count * most_parts // parts:,} requests to decide; {takes}"
        )
        return True

    def evidence(self, load: float, parts: int | None = None) -> Evidence:
        return pooled_evidence([part.evidence for part in self.trials[load][:parts]])

    def decided(self, load: float, parts: int | None = None) -> bool | None:
        question = self.question
        verdict = self.evidence(load, parts).decides(question.wanted, question.z)
        return None if verdict and question.too_short(load) else verdict

    def _measure(self, load: float) -> None:
        part = len(self.trials.get(load, ()))
        trial = self._maker.run(self.question.part(part, load), load, part)
        self._add(trial)
        self.ran += 1
        if self._folder is not None:
            with whole_file(self._folder / TRIALS) as file:  # a full disk leaves no half of a line
                for row in chain.from_iterable(self.trials.values()):
                    file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        evidence = self.evidence(load)
        self._told(
            f"{load:g}/s: {evidence.share:.2%} of {evidence.count:,} requests met the targets "
            f"(part {part + 1})"
        )

    def _add(self, trial: TrialRow) -> None:
        self.trials.setdefault(trial.rate_per_s, []).append(trial)


def _judged(rows: int) -> int:
    """Return the most requests of a part that count."""
    return rows - int(WARM_UP_SHARE * rows)


def _differences(earlier: bytes, about: Mapping[str, Any]) -> list[str]:
    before = orjson.loads(earlier)
    return [key for key in about if before.get(key) != about[key]] or ["other options"]
