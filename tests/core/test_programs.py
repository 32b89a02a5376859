"""Tasks of agents and chats: which go on when the contexts of all exceed the KV caches."""

from math import inf

from forebay.proxy.api.rejections import rejection
from forebay.proxy.core.explain.recorder import DecisionRecorder
from forebay.proxy.core.model import (
    MAJORITY,
    REMEMBERED_MOST,
    BackendSpec,
    Bucket,
    Reject,
    Request,
    Send,
)
from forebay.proxy.core.policy.admission import RETRY_MOST_S, Programs
from forebay.proxy.core.shaper import Shaper
from forebay.proxy.core.state.backend import Backend
from forebay.proxy.diagnose.receipt_text import verdict

BUCKET = Bucket("document", 131_072, max_wait_s=30.0)
BLOCK = 1_000


def turn(program: int, number: int) -> Request:
    """The prompt of a turn: ten blocks, and one more for each turn."""
    blocks = tuple(range(100 * program, 100 * program + 10 + number))
    return Request(f"{program}-{number}", len(blocks) * BLOCK, 10, blocks, BLOCK)


def engines(kv_tokens: float) -> list[Backend]:
    backend = Backend(BackendSpec("gpu0", 8, kv_tokens), [BUCKET])
    backend.up = True
    return [backend]


def came(programs: Programs, request: Request, now: float, *, late: bool = False) -> None:
    programs.came(request, 0, now, admitted=True, late=late)


def three(kv_tokens: float = 40_000) -> tuple[Programs, list[Backend]]:
    """Three programs that go on, and fill 33,000 tokens of the caches; the last turn is late."""
    programs = Programs()
    for number in range(2):
        for program in (1, 2, 3):
            came(programs, turn(program, number), float(number), late=number * program == 3)
    assert programs.tokens == 33_000
    return programs, engines(kv_tokens)


def test_a_new_program_waits_for_room() -> None:
    programs, backends = three()
    assert programs.crowded(turn(4, 0), 0, backends, 2.0)
    assert not programs.crowded(turn(4, 0), 9_000, backends, 2.0)  # most of it is shared


def test_programs_that_began_first_go_on() -> None:
    programs, backends = three(kv_tokens=27_000)
    going = [one for one in (1, 2, 3) if not programs.crowded(turn(one, 2), 0, backends, 2.0)]
    assert going == [1, 2]


def test_nobody_is_held_back_while_no_turn_is_late() -> None:
    programs = Programs()
    for number in range(2):
        for program in (1, 2, 3):
            came(programs, turn(program, number), float(number))
    assert not programs.crowded(turn(4, 0), 0, engines(1_000), 2.0)


def test_prompts_that_nobody_extends_hold_no_room() -> None:
    programs = Programs()
    for program in range(50):
        came(programs, turn(program, 0), 0.0, late=True)
    assert programs.tokens == 0
    assert not programs.crowded(turn(60, 0), 0, engines(1_000), 1.0)


def test_equal_prompts_are_one_program() -> None:
    programs = Programs()
    for _ in range(12):
        came(programs, turn(1, 0), 0.0)
    assert programs.tokens == 10_000


def test_a_program_that_never_comes_back_holds_its_room_for_a_minute() -> None:
    programs, backends = three()
    programs.answered(turn(2, 1), 30.0)
    assert programs.crowded(turn(4, 0), 0, backends, 1.0 + RETRY_MOST_S)
    assert not programs.crowded(turn(4, 0), 0, backends, 2.0 + RETRY_MOST_S)
    assert programs.tokens == 11_000 < MAJORITY * 40_000
    assert not programs.held_back


def test_a_rejected_turn_keeps_its_program_and_a_rejected_start_begins_none() -> None:
    programs, backends = three(kv_tokens=27_000)
    programs.came(turn(4, 0), 0, 2.0, admitted=False, late=False)
    programs.came(turn(3, 2), 0, 50.0, admitted=False, late=False)
    came(programs, turn(1, 2), 50.0)
    came(programs, turn(2, 2), 50.0)
    assert programs.tokens == 36_000
    assert programs.crowded(turn(4, 1), 0, backends, 51.0)
    assert not programs.crowded(turn(2, 3), 0, backends, 51.0)


def test_so_many_programs_are_remembered() -> None:
    programs = Programs()
    for number in range(REMEMBERED_MOST + 100):
        came(programs, Request(str(number), BLOCK, 1, (number,), BLOCK), 0.0)
        came(programs, Request(f"{number}+", BLOCK, 1, (number,), BLOCK), 0.0)
    assert programs.tokens == REMEMBERED_MOST * BLOCK


def test_a_rejection_says_so_and_clients_are_told() -> None:
    shaper = Shaper([BackendSpec("gpu0", 8)], [BUCKET], recorder=DecisionRecorder(10))
    shaper.backend_up("gpu0", 0.0, 40_000.0)
    programs, _ = three()
    shaper._dispatcher.programs = programs
    assert isinstance(shaper.arrive(turn(5, 0), 2.0)[0], Send)  # an idle engine takes any
    (reject,) = shaper.arrive(turn(4, 0), 2.0)
    assert isinstance(reject, Reject)
    assert reject.reason == "deadline_unattainable"
    assert 0 < reject.retry_after_s <= RETRY_MOST_S < inf
    assert shaper.recorder is not None
    receipt = shaper.recorder.receipts.find("4-0")
    assert receipt is not None
    assert receipt.rule == "earlier_programs"
    assert "began before fill the KV caches" in verdict(receipt, 2.0)
    assert rejection(reject, receipt) == "Tasks that began before fill the caches"
    assert not receipt.hindsight  # by policy, not by prediction
