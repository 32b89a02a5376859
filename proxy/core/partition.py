"""Keep one engine clear of long prefills while short requests come in.

A prefill longer than a chat is willing to wait blocks every chat that meets it. With two
engines, one such prefill at a time leaves the other to the chats; so a long prefill may not take
the last clear engine until it has waited a good part of its own patience. At sustained load
beyond one engine every long prefill has waited that long, and both engines work: nothing is lost.
"""

PATIENCE_SHARE = 0.5  # of the bucket's max_wait: after that it may take the last clear engine
FLOWING_S = 10.0  # a bucket with an arrival this lately is flowing


def may_take_last_at(arrived_at: float, max_wait_s: float, flowing_until: float) -> float:
    """When a long prefill may take the last clear engine.

    Args:
        arrived_at: of the long request.
        max_wait_s: of its bucket.
        flowing_until: when the shorter buckets stop flowing unless one more arrives.
    """
    return min(arrived_at + PATIENCE_SHARE * max_wait_s, flowing_until)
