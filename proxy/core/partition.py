"""Keep one engine clear of long prefills while short requests come in.

A prefill longer than a chat is willing to wait blocks every chat that meets it. With two
engines, one such prefill at a time leaves the other to the chats; so a long prefill may not take
the last clear engine until it has waited a good part of its own patience, and nearly all of it
while more than a few of the short requests are being refused. Below that, at sustained load
beyond one engine, every long prefill has waited long enough, both engines work, and nothing is
lost.
"""

from typing import Final

PATIENCE_SHARE: Final = (
    0.5  # of the bucket's max_wait: after that it may take the last clear engine
)
LAST_MOMENT_SHARE: Final = 0.9  # the same while short requests are refused: whom we took, we serve
FLOWING_S: Final = 10.0  # a bucket with an arrival this lately is flowing
REFUSED_MOST: Final = (
    0.005  # of the short requests, lately: what long prefills may cost them, so that p99 holds
)


def may_take_last_at(
    arrived_at: float, max_wait_s: float, flowing_until: float, refused_share: float
) -> float:
    """When a long prefill may take the last clear engine.

    Args:
        arrived_at: of the long request.
        max_wait_s: of its bucket.
        flowing_until: when the shorter buckets stop flowing unless one more arrives.
        refused_share: of the requests of the shorter buckets, lately.
    """
    share = LAST_MOMENT_SHARE if refused_share > REFUSED_MOST else PATIENCE_SHARE
    return min(arrived_at + share * max_wait_s, flowing_until)


def crowded_out(refused_share: float) -> bool:
    """Whether long prefills must reckon with one engine less.

    Half of what would forbid it: who is taken now starts later, when more may be refused.
    """
    return refused_share > REFUSED_MOST / 2
