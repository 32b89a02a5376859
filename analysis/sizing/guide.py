"""Size a fleet: search, neighbouring counts, what binds, what-if variants, pools, plots."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

from forebay.analysis.charts.users_and_gpus import Curve
from forebay.analysis.sizing.binding import Binding, binding
from forebay.analysis.sizing.floor import alone, check_floor
from forebay.analysis.sizing.judge import FleetJudgement, JudgedWindow
from forebay.analysis.sizing.naive import Naive, demands, erlangs, formulas
from forebay.analysis.sizing.search import LeastCount, Question, least_gpus
from forebay.analysis.sizing.targets import LatencyTarget, NotMet
from forebay.analysis.sizing.workers import JobRunner
from forebay.analysis.sizing.workload import DOCUMENT, Users
from forebay.analysis.statistics.units import numbered
from forebay.proxy.config.backends import BackendConfig
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim.scenario import Scenario
from forebay.traces.ground.errors import InputError
from forebay.traces.synth.lengths import Fixed

BEYOND = 20
"""Requests beyond each percentile that the window of one seed has on average."""
FRESH = 1_000  # first seed of the validation, which the search never uses
LONGER = 4  # window of the validation, as a multiple of the search's
SHARES = (0.25, 0.5, 1.0, 1.5)  # points of a curve, as multiples of --users
GUESSED_BUSY = 0.75  # utilisation at the first count tried; affects only the search time


@dataclass(frozen=True)
class SizingAnswer:
    """The result of `size`.

    Attributes:
        gpus: the least count that met the targets with every seed.
        range: lowest and highest least count of the seeds.
        around: the judgement of every seed at `gpus` and the counts next to it.
        binding: the scarce resource; None if one GPU is enough.
        base: the least count of the first seed.
        variants: that count with one thing changed, by the change. None: no number is enough.
    """

    question: Question
    seeds: tuple[int, ...]
    gpus: int
    range: tuple[int, int]
    around: dict[int, list[FleetJudgement]]
    binding: Binding | None
    naive: list[Naive]
    base: int
    variants: dict[str, int | None]


def window_for(
    users: Users,
    targets: Sequence[LatencyTarget],
    config: EngineConfig,
    guess: int,
    judged_s: float | None,
) -> JudgedWindow:
    """A window with BEYOND requests beyond every percentile, after the caches are warm."""
    rates = users.rates_per_s()
    needed_s = [60.0]
    for target in targets:
        rate = rates.get(target.kind, 0.0) if target.kind else users.rate_per_s
        if rate:
            needed_s.append(BEYOND / (1 - target.share) / rate)
    warmup_s = 30.0
    if DOCUMENT in rates:
        prefill_s = alone(config, users.prompt_tokens(DOCUMENT, 0.5)).ttft_s
        warmup_s = max(warmup_s, 5 * prefill_s)
        if users.shared:
            warmup_s += users.documents * prefill_s / guess
    return JudgedWindow(warmup_s, judged_s or float(ceil(max(needed_s))))


def question_of(
    users: Users,
    scenario: Scenario,
    targets: tuple[LatencyTarget, ...],
    window_s: float | None,
    seed: int,
) -> tuple[Question, int, int]:
    """The arguments of `least_gpus`. Raises InputError for targets that cannot be met or judged.

    The search starts at the count with utilisation GUESSED_BUSY and ends at four times the work.
    """
    config = scenario.engine
    _check_judgeable(users, targets, window_s)
    check_floor(config, users, targets)
    offered = erlangs(demands(config, users))
    guess = max(1, ceil(offered / GUESSED_BUSY))
    window = window_for(users, targets, config, guess, window_s)
    question = Question(users, scenario, targets, window, seed)
    return question, guess, max(16, ceil(4 * offered) + 8)


def _check_judgeable(
    users: Users, targets: Sequence[LatencyTarget], judged_s: float | None
) -> None:
    """Raise InputError for a target with no requests, or with too few to judge it.

    With less than one request expected beyond it, a percentile is a maximum and depends on luck.
    Without requests, every target would hold.
    """
    rates = users.rates_per_s()
    for target in targets:
        if target.kind and target.kind not in rates:
            raise InputError(
                f"--slo {target}: no request is a {target.kind} with --document-share"
                f" {users.document_share:g}; leave the target out"
            )
        rate = rates[target.kind] if target.kind else users.rate_per_s
        needed_s = 1 / (1 - target.share) / rate
        if judged_s is not None and judged_s < needed_s * (1 - 1e-9):
            raise InputError(
                f"--window {judged_s:g}: too short for {target.name}: less than one request would"
                f" be beyond the percentile; give {ceil(needed_s):,} or more, or omit --window for"
                f" {BEYOND} such requests"
            )


def size(
    question: Question,
    guess: int,
    most: int,
    run: JobRunner,
    *,
    seeds: Sequence[int],
    varied: bool,
) -> SizingAnswer:
    """Find the least count, up to `most`. Raises NotMet if no count is enough.

    Args:
        varied: also search what-if variants.
    """
    first = [(replace(question, seed=seed), guess, most) for seed in seeds[:2]]
    counts = run.all(least_gpus, first)
    guess = counts[0].gpus
    later = [run.start(least_gpus, replace(question, seed=seed), guess, most) for seed in seeds[2:]]
    changed = _variants(question) if varied else {}
    variants = {what: run.start(_vary, other, counts[0]) for what, other in changed.items()}
    counts += [future.result() for future in later]
    gpus, around = _around(run, question, counts)
    return SizingAnswer(
        question=question,
        seeds=tuple(seeds),
        gpus=gpus,
        range=(min(count.gpus for count in counts), max(count.gpus for count in counts)),
        around=around,
        binding=_binding(run, around, gpus, question),
        naive=formulas(question.scenario.engine, question.users, question.targets, gpus),
        base=counts[0].gpus,
        variants={what: future.result() for what, future in variants.items()},
    )


def _around(
    run: JobRunner, question: Question, least: Sequence[LeastCount]
) -> tuple[int, dict[int, list[FleetJudgement]]]:
    """The least count that all seeds meet, and the judgements at it, one fewer and one more."""
    judgements = {
        (gpus, count.question.seed): j for count in least for gpus, j in count.asked.items()
    }
    seeds, gpus = [count.question.seed for count in least], max(count.gpus for count in least)
    while True:
        counts = [count for count in (gpus - 1, gpus, gpus + 1) if count]
        _add_missing(run, question, list(product(counts, seeds)), judgements)
        around = {count: [judgements[count, seed] for seed in seeds] for count in counts}
        # With one more GPU, requests may be placed less luckily, so that a seed fails again.
        if all(judgement.met for judgement in around[gpus]):
            return gpus, around
        gpus += 1


def _add_missing(
    run: JobRunner,
    question: Question,
    pairs: Sequence[tuple[int, int]],
    judgements: dict[tuple[int, int], FleetJudgement],
) -> None:
    """Simulate every (GPUs, seed) of `pairs` without a judgement, and add it to `judgements`."""
    missing = [key for key in pairs if key not in judgements]
    jobs = [(replace(question, seed=seed), count) for count, seed in missing]
    judgements.update(zip(missing, run.all(Question.ask, jobs), strict=True))


def _binding(
    run: JobRunner, around: dict[int, list[FleetJudgement]], gpus: int, question: Question
) -> Binding | None:
    failed = [judgement for judgement in around.get(gpus - 1, []) if not judgement.met]
    if not failed:
        return None
    usage = failed[0].usage
    what_if = [_with_twice_the_kv(question)]
    if usage.seats_peak >= usage.seats:
        what_if.append(_with_slots(question, 2 * usage.seats))
    jobs = [
        (replace(changed, seed=judgement.seed, decides=True), gpus - 1)
        for changed in what_if
        for judgement in failed
    ]
    met = [judgement.met for judgement in run.all(Question.ask, jobs)]
    missed = [
        attained.target.name
        for judged in failed
        for attained in judged.attained
        if not attained.met
    ]
    fleet = numbered(gpus - 1, question.unit)
    return binding(usage, missed, met[: len(failed)], met[len(failed) :], fleet)


def _with_slots(question: Question, slots: int) -> Question:
    scenario = question.scenario
    engine = replace(scenario.engine, max_num_seqs=max(slots, scenario.engine.seqs))
    # Only max_concurrency of the backend is used.
    backend = BackendConfig(url="http://127.0.0.1:1", max_concurrency=slots)
    proxy = scenario.proxy.model_copy(update={"backends": (backend,)})
    return replace(question, scenario=replace(scenario, engine=engine, proxy=proxy))


def _with_twice_the_kv(question: Question) -> Question:
    engine = question.scenario.engine
    more = replace(engine, num_gpu_blocks_override=2 * engine.kv_budget.blocks)
    return replace(question, scenario=replace(question.scenario, engine=more))


def sharing_takes_minutes(question: Question) -> bool:
    """True if shared prefixes need every step computed: with several groups of layers."""
    return not question.scenario.engine.kv_budget.layout.one_kind


@dataclass(frozen=True, slots=True)
class LeastPools:
    """Engines that only prefill and engines that only decode, for the targets of a question.

    Attributes:
        judged: the judgement of each seed. All met the targets.
    """

    prefill: int
    decode: int
    judged: list[FleetJudgement]

    @property
    def engines(self) -> int:
        return self.prefill + self.decode


def least_pools(
    question: Question,
    seeds: Sequence[int],
    mixed: SizingAnswer | NotMet,
    guess: int,
    run: JobRunner,
) -> LeastPools | None:
    """Find the fewest engines in two pools that meet the targets with every seed.

    None: twice as many as `mixed` are not enough. Of each number, the three splits nearest to the
    parts of the work are tried, the nearest first. Raises InputError for engines whose steps cannot
    be skipped, and `mixed` where neither kind of fleet meets the targets.

    Args:
        mixed: the engines that do both. The search begins with their number, or with `guess`.
    """
    if isinstance(mixed, NotMet):
        first, prefill_part = max(2, guess), mixed.prefill_part
    else:
        first, prefill_part = mixed.gpus, mixed.around[mixed.gpus][0].usage.prefill_part

    def with_engines(count: int) -> LeastPools | None:
        splits = sorted(range(1, count), key=lambda prefill: abs(prefill - prefill_part * count))
        for prefill in splits[:3]:
            pooled = replace(question.scenario, gpus=count, pools=(prefill, count - prefill))
            decided = replace(question, scenario=pooled, decides=True)
            jobs = [(replace(decided, seed=seed), count) for seed in seeds]
            judged = run.all(Question.ask, jobs)
            if all(judgement.met for judgement in judged):
                return LeastPools(prefill, count - prefill, judged)
        return None

    # Go down while fewer are enough, else up.
    count = max(2, first)
    least = with_engines(count)
    while least and count > 2 and (fewer := with_engines(count - 1)):
        least, count = fewer, count - 1
    while not least and count < 2 * first:
        count += 1
        least = with_engines(count)
    if least is None and isinstance(mixed, NotMet):
        raise mixed
    return least


def _variants(question: Question) -> dict[str, Question]:
    users, scenario = question.users, question.scenario
    people: dict[str, Users] = {}
    if users.document_share:
        if users.shared > 0:
            people["no document shared"] = replace(users, shared=0.0)
        if users.shared < 1 and not sharing_takes_minutes(question):
            what = f"all questions about {users.documents} shared documents"
            people[what] = replace(users, shared=1.0)
    for cv in (2.0, 3.0):
        if users.cv != cv:
            people[f"bursts: CV {cv:g} of arrival gaps"] = replace(users, cv=cv)
    variants = {what: replace(question, users=others) for what, others in people.items()}
    if scenario.engine.batched_tokens > 2048 >= scenario.engine.seqs:
        smaller = replace(scenario.engine, max_num_batched_tokens=2048)
        small = replace(question, scenario=replace(scenario, engine=smaller))
        variants["chunks of 2,048 tokens"] = small
    variants["twice the KV cache (fp8 KV)"] = _with_twice_the_kv(question)
    return variants


def _vary(changed: Question, base: LeastCount) -> int | None:
    users, config = changed.users, changed.scenario.engine
    offered = erlangs(demands(config, users))
    before = erlangs(demands(base.question.scenario.engine, base.question.users))
    # Shared documents are not cached everywhere, so the work alone gives far too low a guess.
    guess = max(1, round(base.gpus * max(0.25, offered / before)))
    try:
        check_floor(config, users, changed.targets)
        return least_gpus(replace(changed, decides=True), guess, max(16, 4 * guess + 8)).gpus
    except NotMet:
        return None


@dataclass(frozen=True, slots=True)
class Validation:
    """Judgements of new seeds over a longer window, at N - 1 (empty if N is 1) and N GPUs."""

    window: JudgedWindow
    fewer: list[FleetJudgement]
    recommended: list[FleetJudgement]


def validate(answer: SizingAnswer, run: JobRunner) -> Validation:
    """Simulate seeds that the search never used, `LONGER` times as long."""
    question = answer.question
    window = replace(question.window, judged_s=LONGER * question.window.judged_s)
    counts = [count for count in (answer.gpus - 1, answer.gpus) if count]
    jobs = [
        (replace(question, window=window, seed=FRESH + number), count)
        for count in counts
        for number in range(3)
    ]
    judged = run.all(Question.ask, jobs)
    return Validation(window, judged[:-3], judged[-3:])


def curves(
    users: Users,
    scenario: Scenario,
    targets: tuple[LatencyTarget, ...],
    run: JobRunner,
    *,
    sizes: Sequence[int],
    seed: int,
) -> list[Curve]:
    """Run one search per point, which takes minutes for large fleets."""
    counts = sorted({max(1, round(users.users * share)) for share in SHARES})
    started = []
    for tokens in sizes:
        searches: list[Future[LeastCount]] = []
        why = ""
        try:
            length = Fixed(tokens)
            sized = [replace(users, users=count, document_tokens=length) for count in counts]
            jobs = [question_of(people, scenario, targets, None, seed) for people in sized]
            for job in jobs:
                searches.append(run.start(least_gpus, *job))
        except InputError as error:
            why = str(error)
        started.append((tokens, searches, why))
    return [_curve(tokens, counts, searches, why) for tokens, searches, why in started]


def _curve(
    tokens: int, counts: Sequence[int], searches: Sequence[Future[LeastCount]], why: str
) -> Curve:
    """The points up to the first failed search: a partial plot must not cost the answer."""
    points = []
    try:
        for count, future in zip(counts, searches, strict=False):
            points.append((count, future.result().gpus))
    except InputError as error:
        why = str(error)
    return Curve(tokens, tuple(points), why)
