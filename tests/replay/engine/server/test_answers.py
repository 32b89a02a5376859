"""How answers end: at a limit, or with a token that has no text."""

import pytest

from forebay.replay.engine.server.answers import Ending, ending_of, text_between
from forebay.replay.engine.server.protocol import read_call
from forebay.replay.engine.tokenizer import Generation


@pytest.mark.parametrize(
    ("limits", "room", "ending"),
    [
        ({"max_tokens": 5, "ignore_eos": True}, 3, Ending(3, 3, "length")),
        ({"max_tokens": 5, "ignore_eos": True}, 9, Ending(5, 5, "length")),
        ({"max_tokens": 20}, 9_000, Ending(20, 20, "length")),
        ({"max_tokens": 2_000, "min_tokens": 1_500}, 9_000, Ending(2_000, 1_500, "stop")),
    ],
)
def test_an_answer_ends_at_the_nearest_limit(
    limits: dict[str, int], room: int, ending: Ending
) -> None:
    call = read_call({"prompt": "x", **limits}, chat=False, served_name="")
    assert ending_of(call, Generation(call.prompt), room) == ending


def test_the_last_token_of_a_stop_has_no_text() -> None:
    generation = Generation(read_call({"prompt": "x"}, chat=False, served_name="").prompt)
    assert text_between(generation, 1, 3, None) == generation.words(1, 3)
    assert text_between(generation, 1, 3, "length") == generation.words(1, 3)
    assert text_between(generation, 0, 2, "abort") == generation.words(0, 2)
    assert text_between(generation, 1, 3, "stop") == generation.words(1, 2)
    assert text_between(generation, 2, 3, "stop") == b""
