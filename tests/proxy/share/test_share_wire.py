"""Messages between proxies: valid ones come through, malformed ones do not."""

import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.proxy.api.cache_salt import SECRET, share_cache_secret, share_key
from forebay.proxy.core.model import HISTORY
from forebay.proxy.core.state.elsewhere import BackendReport, ProxyReport, TenantUse
from forebay.proxy.share.wire import MOST_BYTES, BadMessage, Message, Unsigned, decode, encode
from forebay.traces.ground.errors import InputError

AMOUNT = st.floats(0, 9e7).map(lambda x: round(x, 3))
NAMES = st.text(min_size=1, max_size=20)
BOOKS = st.builds(
    BackendReport,
    AMOUNT,
    st.integers(0, 10_000),
    st.integers(0, 10**9).map(float),
    AMOUNT,
    st.integers(0, 10**9).map(float),
    st.integers(0, 10**11).map(float),
    st.tuples(AMOUNT, AMOUNT, AMOUNT),
    st.dictionaries(NAMES, st.integers(1, 99), max_size=3),
    st.dictionaries(NAMES, AMOUNT.filter(bool), max_size=3),
    st.dictionaries(NAMES, AMOUNT.filter(bool), max_size=3),
)


BLOCKS = st.lists(st.integers(0, 2**64 - 1), max_size=9).map(tuple)


@given(
    st.dictionaries(NAMES, BOOKS, max_size=4),
    st.dictionaries(NAMES, AMOUNT, max_size=3),
    st.dictionaries(NAMES, st.lists(BLOCKS, max_size=3), max_size=3),
)
def test_round_trip(
    backends: dict[str, BackendReport],
    tenants: dict[str, float],
    computed: dict[str, list[tuple[int, ...]]],
) -> None:
    use = {name: TenantUse(seconds, 7.0, 80.0, 30.0, 2) for name, seconds in tenants.items()}
    message = decode(encode(Message("me", 3, ProxyReport(backends, use, computed))))
    assert message.report.computed == computed
    assert (message.sender, message.number) == ("me", 3)
    assert message.report.backends.keys() == backends.keys()
    assert message.report.backends == backends
    assert {name: use.prefill_s for name, use in message.report.tenants.items()} == tenants
    for told in message.report.tenants.values():
        assert (told.prompt_tokens, told.charged, told.refunded, told.running) == (7, 80, 30, 2)


GOOD = orjson.loads(encode(Message("me", 3, ProxyReport({"a": BackendReport(1.0, 2)}))))


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": None},
        {"id": ""},
        {"id": "x" * 200},
        {"id": 5},
        {"n": -1},
        {"n": True},
        {"n": 1.5},
        {"backends": None},
        {"backends": {"a": []}},
        {"backends": {"a": [0, 0, 0, 0, 0, 0, 0, [0, 0], {}]}},
        {"backends": {"a": [-1, 0, 0, 0, 0, 0, 0, [0, 0, 0], {}]}},
        {"backends": {"a": [1e300, 0, 0, 0, 0, 0, 0, [0, 0, 0], {}]}},
        {"backends": {"a": ["1", 0, 0, 0, 0, 0, 0, [0, 0, 0], {}]}},
        {"backends": {"a": [0, 0, 0, 0, 0, 0, 0, [0, 0, 0], {"chat": 1}]}},
        {"backends": {"a" * 200: [0, 0, 0, 0, 0, 0, 0, [0, 0, 0], {}]}},
        {"backends": {str(i): [] for i in range(2_000)}},
        {"tenants": {"t": [1]}},
        {"tenants": {"t": [1, 1]}},
        {"tenants": {"t": [True, 1, 1, 1, 1]}},
        {"tenants": {"t": [1, 1, 1, 1, -1]}},
        {"tenants": {"t": [1, 1, -1, 1, 1]}},
        {"tenants": {"t": [1e8, 1, 1, 1, 1]}},
        {"tenants": {"t": [1, 1, 1e12, 1, 1]}},
        {"tenants": {"t": [1, 1, 1, 1e12, 1]}},
        {"tenants": {"t": [1, 1, 1, -1, 1]}},
        {"tenants": {"t": [1, 1, 1, 1, 1e6]}},
        {"backends": {"a": [0, 1e9, 0, 0, 0, 0, 0, [0, 0, 0], {}]}},
        {"backends": {"a": [0, 0, 1e12, 0, 0, 0, 0, [0, 0, 0], {}]}},
        {"backends": {"a": [0, 0, 0, 0, 0, 0, 0, [0, 0, 0], {"chat": [1, 1e9, 1]}]}},
        {"tenants": []},
        {"computed": []},
        {"computed": {"a": "AAAAAAAAAAA="}},
        {"computed": {"a": [5]}},
        {"computed": {"a": ["AAAA"]}},
        {"computed": {"a": ["AAAAAAAAAA!="]}},
        {"computed": {"a" * 200: []}},
    ],
)
def test_bad_fields(change: dict[str, object]) -> None:
    decode(orjson.dumps(GOOD))
    with pytest.raises(BadMessage):
        decode(orjson.dumps({**GOOD, **change}))


KEY = b"k" * 32
SENT = Message("me", 3, ProxyReport({"a": BackendReport(1.0, 2)}))


def test_a_signed_message_counts_only_with_its_mac() -> None:
    signed = encode(SENT, KEY)
    assert decode(signed, KEY).number == 3
    changed = signed.replace(b'"n":3', b'"n":4')
    for data in (encode(SENT), encode(SENT, b"x" * 32), changed, signed[1:], b"", b"\0" * 32):
        with pytest.raises(Unsigned):
            decode(data, KEY)
    with pytest.raises(BadMessage):  # by a proxy without the key: it cannot be read
        decode(signed)


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_an_old_message_cannot_be_sent_again(off_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, now = encode(SENT, KEY), time.time()
    monkeypatch.setattr(time, "time", lambda: now + off_s)
    with pytest.raises(Unsigned, match="old"):
        decode(signed, KEY)


def test_only_a_secret_of_the_operator_signs() -> None:
    """Workers share a random one, which no proxy of another machine has."""
    environ: dict[str, str] = {}
    assert share_key(environ) == b""
    share_cache_secret(environ)
    assert share_key(environ) == b""
    assert len(share_key({SECRET: "s" * 16})) == 32
    with pytest.raises(InputError, match=SECRET):
        share_key({SECRET: "short"})


@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_json_is_refused_in_one_way(value: object) -> None:
    for fields in (value, {**GOOD, "backends": {"a": value}}, {**GOOD, "tenants": value}):
        try:
            decode(orjson.dumps(fields))
        except BadMessage:
            continue
        assert fields["tenants"] == {}  # type: ignore[index]


def test_a_message_of_an_older_proxy_has_no_computed_prompts() -> None:
    fields = {name: value for name, value in GOOD.items() if name != "computed"}
    assert decode(orjson.dumps(fields)).report.computed == {}


def test_the_longest_news_fit_into_a_message() -> None:
    prompts = {"a": [tuple(range(2**64 - 8 * HISTORY, 2**64))]}
    decode(encode(Message("me", 3, ProxyReport({"a": BackendReport(1.0, 2)}, {}, prompts))))


def test_too_long() -> None:
    with pytest.raises(BadMessage):
        decode(b" " * (MOST_BYTES + 1))
