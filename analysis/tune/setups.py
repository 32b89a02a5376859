"""List the set-ups to compare with the present set-up."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from forebay.replay.engine.config import EngineConfig
from forebay.replay.engine.flags import EngineFlags, flag_of
from forebay.replay.engine.limits import FOREBAY_CLASS
from forebay.replay.sim.routers.models import ROUTER_MODELS
from forebay.replay.sim.scenario import ALL_KNOWING, DIRECT, Scenario
from forebay.traces.ground.errors import InputError

AS_IT_IS = "as it is"
FOREBAY = "Forebay"
ROUTING = "warm_or_least_work"
ROUTERS = {
    "nginx round robin": DIRECT,
    "least connections": "least_connections",
    "HAProxy, maxconn 64": "leastconn_64",
    "SMG": "smg_cache_aware",
    "llm-d": "llm_d",
    "vLLM router": "cache_aware",
}
"""Other routers, and the names of their models in the simulator."""
QUEUES = "leastconn_64"
"""Differs from the others in front of a single server, too."""
THRESHOLD = 2048
FLAG, SCHEDULER, SEQS, ROUTER, SERVERS = 1, 2, 3, 4, 8
"""How much a part of a set-up changes. The sum over its parts orders set-ups that are level."""
LEAST_SEQS = 8


@dataclass(frozen=True, slots=True)
class SetUp:
    """One set-up.

    Attributes:
        change: the weight of its changes to the present set-up, 0 for none.
        lost: a sentence on the loss of a spare, or "".
    """

    name: str
    scenario: Scenario
    change: int = 0
    lost: str = ""

    @property
    def called(self) -> str:
        """Return the name at the beginning of a sentence: `Forebay with TP 2`."""
        return self.name.replace(AS_IT_IS, "The present set-up").replace(", ", " with ", 1)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all servers."""
        return self.scenario.gpus * self.scenario.engine.tensor_parallel_size


def set_ups(base: Scenario, peak: int) -> tuple[list[SetUp], dict[str, str]]:
    """Return the set-ups to compare with `base`, and the reasons of impossible set-ups by name.

    Args:
        peak: most requests in flight on one server in the present set-up.
    """
    playable: list[SetUp] = []
    impossible: dict[str, str] = {}
    seen = [base]
    for name, make, change, lost in _proposed(base, peak):
        try:
            scenario = make()
        except InputError as error:
            impossible[name] = str(error)
            continue
        if scenario not in seen:
            seen.append(scenario)
            playable.append(SetUp(name, scenario, change, lost))
    return playable, impossible


Proposal = tuple[str, Callable[[], Scenario], int, str]


def _proposed(base: Scenario, peak: int) -> Iterator[Proposal]:
    """Yield the name, the scenario, the change and the loss of each set-up."""
    flag, seqs = _threshold(base.engine), _seqs(base.engine, peak)
    flags: dict[str, tuple[dict[str, Any], int]] = {
        f"flag {flag}": ({"long_prefill_token_threshold": flag}, FLAG),
        "scheduler class": ({"scheduler_cls": FOREBAY_CLASS}, SCHEDULER),
    }
    # A flag may have the effect of a proxy, so the present router gets the flags, too.
    for name, (values, change) in flags.items():
        yield f"{AS_IT_IS}, {name}", _changed(base, {}, values), change, ""
    flags[f"max-num-seqs {seqs}"] = ({"max_num_seqs": seqs}, SEQS)
    there = is_forebay(base)
    family, routed = (AS_IT_IS, 0) if there else (FOREBAY, ROUTER)
    proxy = {} if there else {"policy": ROUTING}
    with_proxy = [
        (f"{family}, {name}", _changed(base, proxy, values), routed + change, "")
        for name, (values, change) in flags.items()
    ]
    with_proxy += _other_sizes(base, family, proxy, routed + SERVERS)
    if there:
        yield from with_proxy
    for name, policy in ROUTERS.items():
        if base.gpus > 1 or policy in (QUEUES, DIRECT):
            yield name, _changed(base, {"policy": policy}, {}), ROUTER, ""
    if not there:
        yield FOREBAY, _changed(base, proxy, {}), routed, ""
        yield from with_proxy


def _changed(
    base: Scenario, outer: dict[str, Any], engine: dict[str, Any]
) -> Callable[[], Scenario]:
    return lambda: replace(base, engine=replace(base.engine, **engine), **outer)


def _other_sizes(
    base: Scenario, family: str, proxy: dict[str, Any], change: int
) -> Iterator[Proposal]:
    """Yield the set-ups with another number of servers behind Forebay."""
    ranks = base.engine.tensor_parallel_size
    unit = "GPU" if ranks == 1 else "server"

    def sized(servers: int, ranks: int = ranks) -> Callable[[], Scenario]:
        return _changed(base, {**proxy, "gpus": servers}, {"tensor_parallel_size": ranks})

    if base.gpus > 1:
        fewer = base.gpus - 1
        yield f"{family}, one {unit} fewer", sized(fewer), change, _spare(fewer)
    yield f"{family}, one {unit} more", sized(base.gpus + 1), change, ""
    if base.gpus % 2 == 0:
        halved = base.gpus // 2
        yield f"{family}, TP {2 * ranks}", sized(halved, 2 * ranks), change, _spare(halved)


def _spare(servers: int) -> str:
    """Return a sentence on the failure of a server."""
    if servers == 1:
        return "The spare is lost: when the one server fails, nothing answers."
    return f"When one server fails, 1 of {servers} is lost."


def is_forebay(scenario: Scenario) -> bool:
    """True if the policy of a scenario is the proxy's own, or a plug-in of it."""
    return scenario.policy not in (DIRECT, ALL_KNOWING, *ROUTER_MODELS)


def _threshold(engine: EngineConfig) -> int:
    """Return the flag's value. vLLM rounds chunks of recurrent states down to whole blocks."""
    layout = engine.kv_budget.layout
    size = layout.block_size if layout.has_states else 1
    return -(-THRESHOLD // size) * size


def _seqs(engine: EngineConfig, peak: int) -> int:
    """Return another --max-num-seqs: half of the most in flight, or twice a reached limit."""
    if peak >= engine.seqs:
        return 2 * engine.seqs
    return max(LEAST_SEQS, 1 << max(0, (max(1, peak) // 2).bit_length() - 1))


def serve_words(engine: EngineConfig) -> Iterator[str]:
    """Yield the words of the `vllm serve` command: the model, and each flag that is not default."""
    plain = {option.name: option.default for option in fields(EngineConfig)}
    yield from ("vllm", "serve", engine.model_name)
    for flag in fields(EngineFlags):
        value = getattr(engine, flag.name, None)
        if flag.name in ("vllm_version", "acceptance") or value in (None, plain[flag.name]):
            continue
        if isinstance(value, bool):
            yield flag_of(flag.name) if value else f"--no-{flag.name.replace('_', '-')}"
        elif value == FOREBAY_CLASS:
            yield from (flag_of(flag.name), "forebay.proxy.vllm_scheduler.ForebayScheduler")
        else:
            yield from (flag_of(flag.name), str(value))


def to_type(set_up: SetUp) -> list[str]:
    """Return the commands that lead to a set-up, as lines: the servers, then the proxy."""
    import shlex

    scenario = set_up.scenario
    servers = f"{scenario.gpus} server{'s' * (scenario.gpus > 1)}, each:"
    lines = [servers, f"  {shlex.join(serve_words(scenario.engine))}"]
    if is_forebay(scenario):
        urls = " ".join(f"--backend http://SERVER{n}:8000" for n in range(1, scenario.gpus + 1))
        lines += ["In front of them:", f"  forebay proxy {urls}"]
        if scenario.engine.scheduler_cls == FOREBAY_CLASS:
            lines.append("In the proxy's file, give each backend scheduler: forebay.")
        elif threshold := scenario.engine.long_prefill_token_threshold:
            lines.append(
                f"In the proxy's file, give each backend long_prefill_token_threshold: {threshold}."
            )
    elif set_up.change >= ROUTER:
        lines.append(f"In front of them: {set_up.name}.")
    if set_up.lost:
        lines.append(set_up.lost)
    return lines
