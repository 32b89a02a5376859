"""Buckets by prompt length: parsing, order and look-up."""

import pytest

from forebay.traces.ground.buckets import DEFAULT_BUCKETS, LengthBucket, bucket_of, parse_buckets
from forebay.traces.ground.errors import InputError


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (0, "chat"),
        (5_000, "chat"),  # the limit itself still fits
        (5_001, "document"),
        (131_072, "document"),
        (131_073, None),
    ],
)
def test_a_request_falls_in_the_first_bucket_that_holds_it(tokens: int, name: str | None) -> None:
    assert bucket_of(tokens, DEFAULT_BUCKETS) == name


def test_buckets_from_the_command_line() -> None:
    assert parse_buckets("chat:5000, document:131072") == DEFAULT_BUCKETS
    assert parse_buckets("all:1") == (LengthBucket("all", 1),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not NAME:TOKENS"),
        ("chat", "'chat' is not NAME:TOKENS"),
        ("chat:", "'chat:' is not NAME:TOKENS"),
        ("chat:5k", "'chat:5k' is not NAME:TOKENS"),
        ("a b:5", "'a b:5' is not NAME:TOKENS"),
        ("chat:-5", "'chat:-5' is not NAME:TOKENS"),
        ("chat:0", "holds no request"),
        ("chat:5,chat:9", "is given twice"),
        ("chat:5,document:5", "ascending"),
    ],
)
def test_bad_buckets_name_the_option_and_the_part(text: str, says: str) -> None:
    with pytest.raises(InputError, match=r"^--buckets: ") as error:
        parse_buckets(text)
    assert says in str(error.value)
