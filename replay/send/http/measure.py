"""Define the measurements of one request and compute them from its event times. Pure.

t_int is the moment a request was due, t_send the moment just before its bytes went to the
connection. c_1..c_k are the arrivals of events with output, with n_i tokens in each. N is the
number of output tokens that the server counted:

    schedule lag  t_send - t_int = pacing_lag (the client was late) + cap_wait (in-flight limit)
    TTFT          c_1 - t_int (response)     c_1 - t_send (service)
    E2E           c_k - t_int (response)     c_k - t_send (service)
    TPOT          (c_k - c_1) / (N - n_1), undefined when N <= n_1
    ICL           the gaps c_i - c_(i-1)
    ITL           each gap / n_i, counted n_i times; events of one network read, which share one
                  time, count as one event with all their tokens
    stall         the largest ICL

Undefined measurements are None, never 0.
"""

from array import array
from dataclasses import dataclass, field
from operator import sub

DEFINITIONS = {
    "intended": "due time from a schedule made beforehand; closed loop: the moment a slot was free",
    "sent": "just before the body, already bytes, goes to the connection (opening one is service)",
    "output_event": "has non-empty content, reasoning or tool-call text; not role, empty or usage",
    "schedule_lag": "sent - intended = pacing_lag + cap_wait",
    "ttft": "first output event - intended (response; headline) or - sent (service)",
    "e2e": "last output event - intended (response) or - sent (service)",
    "session_e2e": "last output event of the last answer - intended of the first request of a "
    "session with its sub-agents; none if one of them got no answer",
    "tpot": "(last - first output event) / (output_tokens - tokens in the first); undefined for "
    "one token and without usage",
    "icl": "gap between output events; events of one network read share a time stamp",
    "itl": "gap / tokens in the event, counted that many times; 1 token (estimated) unless the "
    "server sends continuous usage; events of one network read count as one",
    "stall": "largest icl of a request",
    "queue_wait": "x-forebay-queue-ms of completed requests",
    "goodput": "requests that met every SLO (response time) / seconds arrivals went on",
    "attainment": "requests that met every SLO / intended (rejected, failed and never sent missed; "
    "of a run that was stopped, those that were sent)",
    "hit_ratio": "sum of cached_tokens / sum of prompt_tokens",
    "percentiles": "nearest rank from HdrHistograms of completed requests; null without samples, "
    "not to be trusted with fewer than 10 beyond; 'inf' where failures count as +inf",
}


@dataclass(slots=True)
class OutputEvents:
    """Arrival times of the events with output, and the number of tokens in each event.

    An event that is only appended to `at_s` counts as one token, which is an estimate.
    """

    at_s: "array[float]" = field(default_factory=lambda: array("d"))
    _counted: int = 0
    _estimated: bool = False
    _tokens: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def tokens(self) -> "array[int]":
        """The number of tokens of each event."""
        missing = len(self.at_s) - len(self._tokens)
        if missing:
            self._tokens.extend([1] * missing)
            self._counted += missing
            self._estimated = True
        return self._tokens

    @property
    def counted(self) -> int:
        """The number of tokens of all events."""
        return self._counted + len(self.at_s) - len(self._tokens)

    @property
    def estimated(self) -> bool:
        """True if the server did not count the tokens of some event."""
        return self._estimated or len(self.at_s) > len(self._tokens)

    def add(self, at_s: float, completion_tokens: int | None = None) -> None:
        """Add one event. `completion_tokens` is the total so far, from continuous usage if sent."""
        if completion_tokens is not None:
            counts = self.tokens
            if completion_tokens > self._counted:
                counts.append(completion_tokens - self._counted)
                self._counted = completion_tokens
        self.at_s.append(at_s)


@dataclass(slots=True)
class Latency:
    """The measurements of one answer, in seconds."""

    first_s: float | None
    last_s: float | None
    pacing_lag_s: float
    cap_wait_s: float
    ttft_response_s: float | None
    ttft_service_s: float | None
    e2e_response_s: float | None
    e2e_service_s: float | None
    tpot_s: float | None
    stall_s: float | None
    icl_s: "array[float]"
    itl_s: list[tuple[float, int]] | None  # None: equal to icl_s, with one token in every event


def measure(
    intended_s: float,
    sent_s: float,
    cap_wait_s: float,
    events: OutputEvents,
    output_tokens: int | None,
) -> Latency:
    """Apply the definitions. `output_tokens` is N, None if the server did not count."""
    # Split the lag into its two causes.
    at = events.at_s
    lag_s = max(0.0, sent_s - intended_s)
    cap_wait_s = min(max(0.0, cap_wait_s), lag_s)
    # With one token in each event, ITL equals ICL.
    gaps = array("d", map(sub, at[1:], at))
    single = events.estimated and events.counted == len(at)
    first, last = (at[0], at[-1]) if at else (None, None)
    total = output_tokens
    if total is None and not events.estimated:
        total = events.counted
    # TPOT leaves out the tokens of the first event.
    after_first = total - (1 if single else events.tokens[0]) if at and total is not None else 0
    tpot = (at[-1] - at[0]) / after_first if after_first > 0 and gaps else None
    return Latency(
        first_s=first,
        last_s=last,
        pacing_lag_s=lag_s - cap_wait_s,
        cap_wait_s=cap_wait_s,
        ttft_response_s=_since(intended_s, first),
        ttft_service_s=_since(sent_s, first),
        e2e_response_s=_since(intended_s, last),
        e2e_service_s=_since(sent_s, last),
        tpot_s=tpot,
        stall_s=max(gaps) if gaps else None,
        icl_s=gaps,
        itl_s=None if single and 0.0 not in gaps else _each_token(gaps, events, single=single),
    )


def _each_token(
    gaps: "array[float]", events: OutputEvents, *, single: bool
) -> list[tuple[float, int]]:
    """Return time and number of the tokens of each read but the first."""
    tokens = array("q", [1]) * len(gaps) if single else events.tokens[1:]
    reads: list[tuple[float, int]] = []  # the gap before each, and its tokens
    for gap, n in zip(gaps, tokens, strict=True):
        if gap > 0.0:
            reads.append((gap, n))
        elif reads:  # else it came with the first event
            reads[-1] = reads[-1][0], reads[-1][1] + n
    return [(gap / n, n) for gap, n in reads if n]


def _since(start_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else at_s - start_s
