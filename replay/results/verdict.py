"""Judge if a run is valid: was it answered, and did requests leave when they were due? Pure.

A client that is late, or that delays requests by its own in-flight limit, measures itself. One
arrival in a hundred may be later than the limit: 10 ms or 1 % of the tightest TTFT target, the
larger of both. So small an error cannot decide if a target was met.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forebay.replay.plan.slo import Slo
from forebay.replay.results.row import Row

LEAST_LIMIT_S = 0.010
SLO_SHARE = 0.01
LATE_SHARE = 0.01
MOST_LOST = 0.5  # share of requests that may fail or stay unsent: the others then show little
FAILED = "failed"
INTERRUPTED = "interrupted"
OTHER_LOAD = "other-load"
SAID_FROM = 0.05  # share of the asked tokens by which a load may differ unsaid
MOST_UNCOUNTED = 0.01  # share of answers without usage: with more, a run has no rate of tokens
FEW_TOKENS = 64  # tokens of a chat template in each prompt, which no trace counts


def lag_limit_s(slos: Sequence[Slo]) -> float:
    tightest = min((slo.limit_s for slo in slos if slo.metric == "ttft"), default=0.0)
    return max(LEAST_LIMIT_S, SLO_SHARE * tightest)


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict on a run.

    `word` is valid, failed, interrupted, other-load, client-limited or cap-limited.
    `at_s` is the second of the run from which it is not valid.
    """

    word: str
    reason: str
    at_s: float | None = None


def judge_answers(
    requests: int,
    completed: int,
    rejected: Mapping[str, int],
    failed: Mapping[str, int],
    ended: str = "complete",
) -> RunVerdict | None:
    """Return the verdict on a run that lost its requests or was stopped, else None.

    Args:
        rejected: rejections by admission, by code. An overload test measures them, so they count
            as lost only if no request was answered.
        failed: failures by reason, with never_sent.
        ended: complete, interrupted or drain timeout.
    """
    unsent = failed.get("never_sent", 0)
    if ended == INTERRUPTED:
        sent = f"{requests - unsent:,} of {requests:,} requests had been sent"
        return RunVerdict(INTERRUPTED, f"stopped after {sent}")
    lost = sum(failed.values())
    if requests and not completed:
        words, missing = f"none of {requests:,} requests was answered", {**rejected, **failed}
    elif lost > MOST_LOST * requests:
        words, missing = f"{lost:,} of {requests:,} requests were lost", dict(failed)
    else:
        return None
    why = ", ".join(f"{name} {count:,}" for name, count in missing.items())
    return RunVerdict(FAILED, f"{words}: {why}")


@dataclass(slots=True)
class Lengths:
    """Compares the tokens that complete requests asked for with the tokens that servers counted."""

    counted: int = 0
    asked_tokens: int = 0
    got_tokens: int = 0
    off_tokens: int = 0
    differing: int = 0
    uncounted: int = 0
    prompts: int = 0
    uncounted_prompts: int = 0
    trace_tokens: int = 0
    prompt_tokens: int = 0

    def add(self, row: Row) -> None:
        """Add a complete request."""
        if row.prompt_tokens is None:
            self.uncounted_prompts += 1
        else:
            self.prompts += 1
            self.trace_tokens += row.input_tokens
            self.prompt_tokens += row.prompt_tokens
        if row.output_tokens is None:
            self.uncounted += row.first_s is not None
        elif row.asked_tokens is not None:
            planned = max(1, row.asked_tokens)  # no request asks for an answer of 0 tokens
            self.counted += 1
            self.asked_tokens += planned
            self.got_tokens += row.output_tokens
            self.off_tokens += abs(row.output_tokens - planned)
            self.differing += row.output_tokens != planned

    def judge(self) -> RunVerdict | None:
        """Return the verdict on answers that are far from the asked lengths, else None."""
        if self.off_tokens <= MOST_LOST * self.asked_tokens:
            return None
        return RunVerdict(OTHER_LOAD, self._answers())

    def warnings(self, *, exact: bool) -> list[str]:
        """Return a line for each difference from the trace.

        `exact`: answers were to have the lengths of the trace.
        """
        said = []
        if exact and self.off_tokens > SAID_FROM * self.asked_tokens:
            said.append(self._answers())
        off = abs(self.prompt_tokens - self.trace_tokens)
        if off > SAID_FROM * self.trace_tokens and off > FEW_TOKENS * self.prompts:
            said.append(
                f"prompts have {self.prompt_tokens / self.prompts:,.0f} tokens by the servers' "
                f"count and {self.trace_tokens / self.prompts:,.0f} by the trace's (means)"
            )
        if self.uncounted:
            said.append(
                f"{self.uncounted:,} answers came without usage: their tokens are not counted, "
                "they have no TPOT, and ITL takes each event as one token"
            )
        return said

    def _answers(self) -> str:
        got, planned = self.got_tokens / self.counted, self.asked_tokens / self.counted
        return (
            f"answers have {got:,.0f} of {planned:,.0f} tokens (means), "
            f"{got / planned * 100:.0f} % of the trace's length; "
            f"{self.differing:,} of {self.counted:,} differ"
        )


@dataclass(slots=True)
class Lateness:
    """Counts arrivals that left later than `limit_s` after they were due, by cause."""

    limit_s: float
    arrivals: int = 0
    client_late: int = 0
    cap_late: int = 0
    client_from_s: float | None = None
    cap_from_s: float | None = None

    @property
    def late(self) -> int:
        """Return the number of late arrivals, for the cause that delayed more."""
        return max(self.client_late, self.cap_late)

    def add(self, intended_s: float, pacing_lag_s: float, cap_wait_s: float) -> None:
        self.arrivals += 1
        if pacing_lag_s > self.limit_s:
            self.client_late += 1
            self.client_from_s = _earlier(self.client_from_s, intended_s)
        if cap_wait_s > self.limit_s:
            self.cap_late += 1
            self.cap_from_s = _earlier(self.cap_from_s, intended_s)

    def judge(self, *, closed: bool = False) -> RunVerdict:
        """Make the verdict. In a `closed` loop a request is due when its slot is free."""
        if not self.arrivals:
            return RunVerdict("client-limited", "nothing was sent", 0.0)
        late = f"{self.late:,} of {self.arrivals:,} requests"
        limit = f"more than {self.limit_s * 1e3:g} ms"
        left = f"{late} left {limit} {'after their slot was free' if closed else 'late'}"
        if self.late <= max(1.0, LATE_SHARE * self.arrivals):
            return RunVerdict("valid", left)
        # Name the larger cause, which has its own remedy. In a closed loop the in-flight limit is
        # the plan, so only the client can be late.
        if self.cap_late >= self.client_late and not closed:
            words = f"{late} waited {limit} for --max-in-flight; raise it"
            return RunVerdict("cap-limited", words, self.cap_from_s)
        fewer = "fewer requests in flight" if closed else "a lower rate"
        return RunVerdict(
            "client-limited",
            f"{left} because this machine was busy; use a faster one, {fewer} or a lower time "
            "scale",
            self.client_from_s,
        )


def _earlier(before: float | None, when: float) -> float:
    return when if before is None else min(before, when)
