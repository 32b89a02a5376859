"""The message in which a proxy publishes its state: small, versioned JSON.

    {"v": 3, "id": "host-pid-boot", "n": 17,
     "backends": {"gpu0": [backlog_s, running, kv_tokens, longest_s, load, fresh_tokens,
                           short_s, [work, work, work], {"chat": [prefills, queued_s, worked]}]},
     "tenants": {"a": [prefill_s, prompt_tokens, charged, refunded, running]},
     "computed": {"gpu0": ["block hashes of 64 bits, little-endian, in base64"]},
     "budgets": {"a": [tokens of the hour, its seconds left, tokens of the day, its seconds left]},
     "at": seconds since 1970}

`budgets` is there while another proxy is new.

With a key, an HMAC-SHA256 of the JSON stands in front of it. Messages come from outside: everything
is checked before the core sees it.
"""

import time
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hmac import compare_digest
from hmac import digest as hmac_digest
from math import isfinite
from struct import error as StructError
from struct import pack, unpack
from typing import Any

import orjson

from forebay.proxy.core.state.elsewhere import BackendReport, ProxyReport, TenantUse

VERSION = 3
MOST_BYTES = 1 << 16
MOST_NAMES = 1024  # backends, buckets or tenants in one message
MOST_NAME = 128  # characters
MOST = 1e15  # bound of any number
MOST_TOKENS = 1e12  # of one tenant, or on one backend: at 50,000 tokens/s in 230 days
MOST_S = 1e8  # seconds of prefill: three GPUs in a year
MOST_RUNNING = 1e6  # requests of one proxy
MAC_BYTES = 32
AGE_S = 60.0  # of a signed message; clocks may differ by this


Budgets = Mapping[str, Sequence[float]]


class BadMessage(Exception):
    """The data is no message of this version. It is ignored and counted."""


class Unsigned(BadMessage):
    """The message is not signed with our key, or is too old."""


@dataclass(frozen=True, slots=True)
class Message:
    """The state of one sender.

    Attributes:
        number: grows with every message of a sender.
        budgets: the open windows of tenants (`Spending.windows`); None: not told this time.
    """

    sender: str
    number: int
    report: ProxyReport
    budgets: Budgets | None = None


def encode(message: Message, key: bytes = b"") -> bytes:
    """Encode a message for the wire, signed if there is a key."""
    report = message.report
    data = orjson.dumps(
        {
            "v": VERSION,
            "at": round(time.time(), 1),
            "id": message.sender,
            "n": message.number,
            "backends": {name: _row(b) for name, b in report.backends.items()},
            "tenants": {
                name: [
                    round(use.prefill_s, 3),
                    round(use.prompt_tokens),
                    round(use.charged),
                    round(use.refunded),
                    use.running,
                ]
                for name, use in report.tenants.items()
                if len(name) <= MOST_NAME
            },
            "computed": {
                name: [b64encode(pack(f"<{len(p)}Q", *p)).decode() for p in prompts]
                for name, prompts in report.computed.items()
            },
            "budgets": message.budgets,
        }
    )
    return hmac_digest(key, data, "sha256") + data if key else data


def decode(data: bytes, key: bytes = b"") -> Message:
    """Decode a message from the wire. Raises BadMessage, Unsigned without the MAC of a key."""
    fields = _fields(data, key)
    sender, number = fields.get("id"), fields.get("n")
    if not isinstance(sender, str) or not 0 < len(sender) <= MOST_NAME:
        raise BadMessage("no sender")
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise BadMessage("no number")
    backends = {name: _backend(row) for name, row in _table(fields.get("backends")).items()}
    tenants = {name: _tenant(row) for name, row in _table(fields.get("tenants")).items()}
    # Older proxies do not send it.
    computed = {name: _prompts(row) for name, row in _table(fields.get("computed", {})).items()}
    report = ProxyReport(backends, tenants, computed)
    return Message(sender, number, report, _budgets(fields.get("budgets")))


def _fields(data: bytes, key: bytes) -> dict[str, Any]:
    """Return the JSON of a message. Raises BadMessage, Unsigned."""
    if len(data) > MOST_BYTES:
        raise BadMessage(f"{len(data)} bytes")
    if key:
        code, data = data[:MAC_BYTES], data[MAC_BYTES:]
        if not compare_digest(code, hmac_digest(key, data, "sha256")):
            raise Unsigned("no MAC, or of another key")
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadMessage("not JSON") from error
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        raise BadMessage("not of this version")
    if key and abs(_numbers([fields.get("at")], 1)[0] - time.time()) > AGE_S:
        raise Unsigned("an old message, or clocks that differ")
    return fields


def _budgets(value: object) -> Budgets | None:
    if value is None:
        return None
    return {name: _numbers(row, 4, most=MOST_TOKENS) for name, row in _table(value).items()}


def _row(report: BackendReport) -> list[Any]:
    buckets = dict.fromkeys([*report.prefills, *report.queued_s, *report.worked])
    return [
        round(report.backlog_s, 4),
        report.running,
        round(report.kv_tokens),
        round(report.longest_s, 4),
        round(report.load, 1),
        round(report.fresh_tokens),
        round(report.short_s, 4),
        [round(term, 5) for term in report.work],
        {
            name: [
                report.prefills.get(name, 0),
                round(report.queued_s.get(name, 0.0), 4),
                round(report.worked.get(name, 0.0), 4),
            ]
            for name in buckets
        },
    ]


def _backend(row: object) -> BackendReport:
    if not isinstance(row, list) or len(row) != 9:
        raise BadMessage("a backend is a list of 9")
    backlog_s, longest_s, short_s = _numbers([row[0], row[3], row[6]], 3, most=MOST_S)
    kv_tokens, load, fresh_tokens = _numbers([row[2], row[4], row[5]], 3, most=MOST_TOKENS)
    (running,) = _numbers(row[1:2], 1, most=MOST_RUNNING)
    work = _numbers(row[7], 3)
    buckets = {name: _numbers(values, 3, most=MOST_S) for name, values in _table(row[8]).items()}
    return BackendReport(
        backlog_s,
        int(running),
        kv_tokens,
        longest_s,
        load,
        fresh_tokens,
        (work[0], work[1], work[2]),
        {name: int(values[0]) for name, values in buckets.items() if values[0]},
        {name: values[1] for name, values in buckets.items() if values[1]},
        {name: values[2] for name, values in buckets.items() if values[2]},
        short_s,
    )


def _tenant(row: object) -> TenantUse:
    if not isinstance(row, list) or len(row) != 5:
        raise BadMessage("a tenant is a list of 5")
    (prefill_s,) = _numbers(row[:1], 1, least=-MOST_S, most=MOST_S)
    prompt_tokens, charged, refunded = _numbers(row[1:4], 3, most=MOST_TOKENS)
    (running,) = _numbers(row[4:], 1, most=MOST_RUNNING)
    return TenantUse(prefill_s, prompt_tokens, charged, refunded, int(running))


def _prompts(value: object) -> list[tuple[int, ...]]:
    if not isinstance(value, list):
        raise BadMessage("not a list of prompts")
    prompts = []
    for text in value:
        try:
            data = b64decode(text, validate=True)
            prompts.append(unpack(f"<{len(data) // 8}Q", data))
        except (TypeError, ValueError, StructError) as error:
            raise BadMessage("not the blocks of a prompt") from error
    return prompts


def _table(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or len(value) > MOST_NAMES:
        raise BadMessage("not a table of names")
    if any(len(name) > MOST_NAME for name in value):
        raise BadMessage("a name is too long")
    return value


def _numbers(value: object, count: int, *, least: float = 0.0, most: float = MOST) -> list[float]:
    """Return `value` as `count` numbers from `least` to below `most`. Raises BadMessage."""
    if not isinstance(value, list) or len(value) != count:
        raise BadMessage(f"not {count} numbers")
    numbers: list[float] = []
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise BadMessage("not a number")
        if not isfinite(number) or not least <= number < most:
            raise BadMessage(f"{number} is out of range")
        numbers.append(float(number))
    return numbers
