"""kv-cache-tester sessions: blocks of full 64 tokens, sub-agents, ids that mean nothing outside."""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from paths import SHARED

from forebay.traces.formats.readers.kv_cache_tester import interleaved, read_sessions
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest

SESSIONS = SHARED / "data" / "traces" / "kv_cache_tester"


def turn(t: float, tokens: int, out: int = 5, **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": out,
            "hash_ids": list(range(tokens // 64)), **more}  # fmt: skip


def write(folder: Path, name: str, *requests: Mapping[str, Any], **more: Any) -> Path:
    path = folder / f"{name}.json"
    session = {"id": name, "block_size": 64, "requests": requests, **more}
    path.write_text(json.dumps(session))
    return path


def read_session(path: Path) -> list[TraceRequest]:
    (session,) = read_sessions(path)
    return session


def test_a_partial_last_block_is_nobody_elses(tmp_path: Path) -> None:
    path = write(tmp_path, "a", turn(0.0, 130), turn(4.5, 128), turn(9.0, 130))
    first, full, third = read_session(path)
    assert (first.id, first.session, first.block_tokens) == ("a-0", "a", 64)
    assert [row.arrival_s for row in (first, full, third)] == [0.0, 4.5, 9.0]
    assert first.blocks is not None
    assert full.blocks is not None
    assert third.blocks is not None
    assert (len(first.blocks), len(full.blocks)) == (3, 2)
    assert first.blocks[:2] == full.blocks == third.blocks[:2]
    assert first.blocks[2] != third.blocks[2]


def test_sessions_share_nothing(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, name, turn(0.0, 256))
    one, other = (set(session[0].blocks or ()) for session in read_sessions(tmp_path))
    assert not one & other


def test_a_sub_agents_times_count_from_its_own_start(tmp_path: Path) -> None:
    agent = {"t": 10.0, "type": "subagent", "requests": [turn(0.0, 64), turn(7.0, 64)]}
    session = read_session(write(tmp_path, "a", turn(0.0, 64), agent, turn(12.0, 64)))
    assert [row.arrival_s for row in session] == [0.0, 10.0, 12.0, 17.0]
    assert len({row.id for row in session}) == 4


def test_wekas_sub_agents_count_from_the_sessions_start(tmp_path: Path) -> None:
    """The same calls as in the test above, as the published AgentX traces write them."""
    agent = {"t": 10.0, "type": "subagent", "requests": [turn(10.0, 64), turn(17.0, 64)]}
    session = read_session(write(tmp_path, "a", turn(0.0, 64), agent, turn(12.0, 64)))
    assert [row.arrival_s for row in session] == [0.0, 10.0, 12.0, 17.0]


def test_prompts_of_a_session_hold_each_block_id_once(tmp_path: Path) -> None:
    """A tuple takes 8 bytes an id so, and not 40: the 710 published sessions have 90 million."""
    first, second = read_session(write(tmp_path, "a", turn(0.0, 128), turn(1.0, 192)))
    assert first.blocks is not None
    assert second.blocks is not None
    assert first.blocks[1] is second.blocks[1]


def test_sessions_are_laid_over_each_other_and_long_pauses_cut(tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path, f"s{number}", turn(0.0, 64), turn(2.0, 64), turn(500.0, 64))
    sessions = read_sessions(tmp_path)
    rows = interleaved(sessions, start_gap_s=3.0, longest_gap_s=20.0, seed=1)
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    for name in {row.session for row in rows}:
        times = [row.arrival_s for row in rows if row.session == name]
        assert [b - a for a, b in pairwise(times)] == pytest.approx([2.0, 20.0], abs=1e-5)
    assert rows == interleaved(sessions, start_gap_s=3.0, longest_gap_s=20.0, seed=1)
    assert rows != interleaved(sessions, start_gap_s=3.0, longest_gap_s=20.0, seed=2)
    with pytest.raises(InputError, match="more than 0 seconds"):
        interleaved(sessions, start_gap_s=0.0, longest_gap_s=1.0, seed=0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[5]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"id": "a", "requests": []}', "block_size"),
        ('{"id": "a", "block_size": 64}', "requests: not a list"),
        ('{"id": "a", "block_size": 64, "requests": []}', "without requests"),
        (json.dumps({"block_size": 64, "requests": [turn(0.0, 130) | {"hash_ids": [1, 2, 3]}]}),
         "3 hash_ids for 130 tokens; full blocks of 64 tokens make 2"),
        (json.dumps({"block_size": 64, "requests": [turn(0.0, 64) | {"hash_ids": [-1]}]}),
         "whole numbers from 0"),
        (json.dumps({"block_size": 64, "requests": [turn(-1.0, 64)]}), "t: -1.0 is not a time"),
    ],
)  # fmt: skip
def test_what_is_no_session_is_named(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(InputError, match=says) as raised:
        read_session(path)
    assert str(path) in str(raised.value)


def test_an_empty_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no session"):
        read_sessions(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_session(tmp_path / "none.json")


@pytest.mark.skipif(not SESSIONS.exists(), reason="needs the public traces in ../shared")
def test_the_published_sessions_are_read_whole() -> None:
    sessions = read_sessions(SESSIONS)
    assert len(sessions) == 25
    assert sum(map(len, sessions)) == 407  # 395, and 12 of two sub-agents
    assert max(row.input_tokens for session in sessions for row in session) <= 131_072
