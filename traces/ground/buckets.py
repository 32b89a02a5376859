"""Decide which length bucket a request belongs to: one rule for proxy, replay and reports.

Only the number of prompt tokens decides.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from forebay.traces.ground.errors import InputError

# Names become response headers, metric labels and histogram tags, where no name needs quotes.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Requests of at most `up_to` prompt tokens that fit no smaller bucket.

    Attributes:
        target_s: a first token within this time is in time; infinite without a target.
    """

    name: str
    up_to: int
    target_s: float = inf


DEFAULT_BUCKETS = (LengthBucket("chat", 5_000, 2.0), LengthBucket("document", 131_072, 15.0))


def named_bucket(name: str, up_to: int) -> LengthBucket:
    """Return a bucket with the target that a default bucket of this name has."""
    targets = (bucket.target_s for bucket in DEFAULT_BUCKETS if bucket.name == name)
    return LengthBucket(name, up_to, next(targets, inf))


def bucket_of(tokens: int, buckets: Sequence[LengthBucket] = DEFAULT_BUCKETS) -> str | None:
    """Return the name of the first bucket that fits `tokens`, or None.

    `buckets` are in ascending order of `up_to`, as `parse_buckets` ensures.
    """
    for bucket in buckets:
        if tokens <= bucket.up_to:
            return bucket.name
    return None


def parse_buckets(text: str) -> tuple[LengthBucket, ...]:
    """Read buckets such as `chat:5000,document:131072`.

    Raises:
        InputError: a part is not NAME:TOKENS, a name is repeated, or the limits do not ascend.
    """
    buckets: list[LengthBucket] = []
    for part in text.split(","):
        name, colon, limit = part.strip().partition(":")
        if not colon or not _NAME.fullmatch(name) or not re.fullmatch(r"[0-9]{1,12}", limit):
            raise InputError(
                f"--buckets: {part.strip()!r} is not NAME:TOKENS; write e.g. "
                "chat:5000,document:131072"
            )
        bucket = named_bucket(name, int(limit))
        if bucket.up_to < 1:
            raise InputError(f"--buckets: {part.strip()!r} holds no request; give 1 token or more")
        if any(name == other.name for other in buckets):
            raise InputError(f"--buckets: bucket {name!r} is given twice; give each its own name")
        if buckets and bucket.up_to <= buckets[-1].up_to:
            raise InputError(
                f"--buckets: {name}:{limit} after {buckets[-1].name}:{buckets[-1].up_to}; "
                "put the buckets in ascending order"
            )
        buckets.append(bucket)
    return tuple(buckets)
