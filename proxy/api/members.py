"""Add a member to a JSON body without a second pass over a long prompt."""


def with_member(body: bytes, name: str, value: str, *, empty: bool = False) -> bytes:
    """Return `body` with `name` as its last member.

    The last of several equal keys counts, in vLLM's parsers as in ours. So this overrides the
    client's own, however its key is spelled.

    Args:
        body: a valid JSON object.
        value: as JSON.
        empty: the object has no members.
    """
    end = len(body) - 1
    while body[end] != 0x7D:  # white space may follow the brace
        end -= 1
    member = f'{"" if empty else ","}"{name}":{value}}}'
    return b"".join((memoryview(body)[:end], member.encode()))  # copied once
