"""Split prefill in virtual time: chats run in between, and each part is tokenized anew."""

from math import inf

import pytest

from forebay.proxy.core.model import Action, BackendSpec, Bucket, Send
from forebay.proxy.core.shaper import Shaper
from forebay.replay.engine.config import EngineConfig
from forebay.replay.sim import fleet as fleets
from forebay.replay.sim.fleet import Fleet
from forebay.replay.sim.served import served_engine
from forebay.traces.schema import TraceRequest

DOCUMENT = TraceRequest("document", 5.1, 120_000, 50, tuple(range(235)))


def played(piece_s: float) -> tuple[float, float, int]:
    """TTFT of a document, longest TTFT of chats beside it (seconds), and the number of parts."""
    buckets = [Bucket("chat", 5_000, 100, 2.0), Bucket("document", 131_072, 10, 30.0)]
    shaper = Shaper([BackendSpec("a", 64, piece_s=piece_s)], buckets)
    pieces = 0

    def record(now: float, action: Action) -> None:
        nonlocal pieces
        pieces += isinstance(action, Send) and action.piece_blocks > 0

    chats = [TraceRequest(f"chat {i}", i / 2, 500, 20, ()) for i in range(40)]
    trace = sorted([*chats, DOCUMENT], key=lambda row: row.arrival_s)
    fleet = Fleet(shaper, {"a": served_engine(EngineConfig())}, record=record)
    ttft_s = {one.request.id: one.ttft_s for one in fleet.run(trace)}
    chats_s = [inf if (s := ttft_s[chat.id]) is None else s for chat in chats]
    document_s = ttft_s["document"]
    assert document_s is not None
    return document_s, max(chats_s), pieces


def test_chats_get_in_between_and_tokenizing_anew_takes_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, beside_whole_s, none = played(inf)
    document_s, beside_pieces_s, pieces = played(1.2)
    assert none == 0
    assert beside_whole_s > 5.0
    assert 5 <= pieces <= 8
    assert beside_pieces_s < 2.0
    monkeypatch.setattr(fleets, "TOKENIZE_S", 0.0)
    at_once_s, _, _ = played(1.2)
    # About half of the prompt, on average, as often as there are pieces.
    tokenizing_s = document_s - at_once_s
    assert tokenizing_s == pytest.approx(pieces * 2.2e-6 * 60_000, rel=0.5)
