"""Make the plan of a replay: all that is decided before the first request is sent."""

import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from secrets import token_hex

import aiohttp

from forebay.replay.plan.agenda import Agenda, link, root_pace, root_rate
from forebay.replay.plan.options import ReplayOptions
from forebay.replay.plan.schedule import Schedule, make_schedule
from forebay.replay.plan.slo import Slo, check_sessions
from forebay.replay.plan.source import Scan, TraceSource
from forebay.replay.plan.target import Served, Target, ask_served, parse_targets
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A replay, or the part of it that one process sends.

    Attributes:
        agenda: the order of turns that wait for answers, None if no turn waits.
        run_id: prefix of the ids of requests.
    """

    options: ReplayOptions
    targets: tuple[Target, ...]
    served: Served
    slos: tuple[Slo, ...]
    source: TraceSource
    scan: Scan
    schedule: Schedule
    agenda: Agenda | None
    run_id: str

    @property
    def count(self) -> int:
        """The number of requests."""
        return self.schedule.count if self.agenda is None else len(self.agenda.rows)

    @property
    def most_in_flight(self) -> int:
        """The in-flight limit. A closed loop of sessions has sub-agents in addition to them."""
        closed = self.schedule.arrivals.closed
        return closed if closed and self.agenda is None else self.options.max_in_flight

    def window_s(self, sent: int) -> float:
        """Return the seconds of arrivals after `sent` requests. 0: until the last answer."""
        return 0.0 if self.agenda is not None else self.schedule.window_after(sent)

    def unsent(
        self, was_sent: Callable[[int], bool]
    ) -> Iterator[tuple[TraceRequest, float | None]]:
        """Yield the scheduled requests that were not sent, and their due times if known.

        A closed loop with a duration has none.
        """
        schedule = self.schedule
        if schedule.arrivals.closed and self.options.duration_s is not None:
            return
        times = () if self.agenda is not None else schedule.times_s
        for index, request in enumerate(self.source.requests()):
            if self.agenda is None and index >= schedule.count:
                break
            if not was_sent(index):
                yield request, times[index] if times else None

    def comments(self) -> list[str]:
        """Return the first lines of the log."""
        return [
            "forebay replay: tags are metric.bucket, recorded when the request ended",
            f"seed {self.options.seed}, time scale {self.options.time_scale:g}, run {self.run_id}",
            f"schedule sha256 {self.schedule.sha256}",
        ]

    def print_changes(self) -> None:
        """Print how many rows of the trace are not sent as they are."""
        for count, what in (
            (self.scan.skipped, "bad rows skipped"),
            (self.scan.dropped, "rows longer than the model's context dropped"),
            (
                self.scan.truncated(self.schedule.count),
                "rows longer than the model's context shortened",
            ),
        ):
            if count:
                say(f"{self.source.name}: {count} {what}")


def plan_schedule(
    options: ReplayOptions, source: TraceSource, scan: Scan
) -> tuple[Schedule, Agenda | None]:
    """Plan the due times of all requests, or of the roots of a trace whose turns wait.

    A rate counts all requests. Think times stay the same.

    Raises:
        InputError: a wrong option, or a trace that cannot be linked.
    """
    agenda, times_s, rate = None, scan.arrivals_s, options.rate_per_s
    if scan.linked and options.turns == "wait":
        agenda = link(list(source.requests()), source.name, lenient=source.may_lack_rows)
        times_s = array("d", [agenda.rows[index].arrival_s for index in agenda.roots])
        rate = root_rate(agenda, rate)
    schedule = make_schedule(
        times_s,
        options.arrivals,
        rate_per_s=rate,
        speed=options.speed,
        duration_s=options.duration_s,
        seed=options.seed,
    )
    if agenda is not None:
        agenda.pace = root_pace(agenda, options.arrivals, rate, options.speed)
    return schedule, agenda


async def make_plan(options: ReplayOptions, served: Served | None = None) -> ReplayPlan:
    """Plan a replay, and ask the targets for their models unless `served` describes them.

    Raises:
        InputError: bad options, a bad trace, or a target that cannot serve it.
    """
    # Errors of the options, the trace or the rate can be found without a server: report them first.
    options.check()
    targets = parse_targets(options.targets)
    source = TraceSource(
        options.trace,
        format_name=options.format_name,
        skip_bad=options.skip_bad,
        too_long=options.too_long,
    )
    scan = source.scan()
    plan_schedule(options, source, scan)
    if served is None and (options.ask_models or options.model is None):
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(headers=headers, cookie_jar=jar) as session:
            served = await ask_served(session, targets, options.model, scan.models)
    elif served is None:
        served = Served(options.model or "", None)
    # The context of the model decides which rows are sent.
    limits = [n for n in (served.max_model_len, options.max_model_len) if n is not None]
    if limits:
        scan = source.limit_to(scan, min(limits))
    if options.keys and (unknown := sorted(scan.tenants - set(options.keys))):
        raise InputError(f"--keys: has no key of tenant {unknown[0]!r}; add it")
    schedule, agenda = plan_schedule(options, source, scan)
    source.check(scan, len(scan.arrivals_s) if agenda else schedule.count)
    slos = options.stated_slos()
    check_sessions(slos, scan.sessions)
    return ReplayPlan(options, targets, served, slos, source, scan, schedule, agenda, token_hex(4))


def say(text: str) -> None:
    """Print a message of the replay to standard error."""
    print(f"forebay replay: {text}", file=sys.stderr)
