"""Verbs change a trace and keep its order, its sessions and its sharing; formats out read back."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from commands import printed, refusal
from paths import ROOT, SHARED

from forebay.traces.edit.describe import describe
from forebay.traces.edit.edit import anonymise, cap, cut, merge, sample, scale, shift, thin
from forebay.traces.edit.export import export
from forebay.traces.edit.sharing import IdealCache
from forebay.traces.formats import ReadOptions, detect, open_trace
from forebay.traces.formats import table as registry
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.reading.jsonl import read_trace, write_trace
from forebay.traces.synth.fit_model import fit
from forebay.traces.synth.from_model import synthesise
from forebay.traces.synth.model import read_model, write_model
from forebay.traces.synth.ticks import spread_ticks

TRACES = SHARED / "data" / "traces"
needs_data = pytest.mark.skipif(not TRACES.is_dir(), reason="no ../shared/data")


def session(name: str, start_s: float, turns: int = 3) -> list[TraceRequest]:
    """Make turns 10 s apart; each prompt is the one before and one more block."""
    made: list[TraceRequest] = []
    for turn in range(turns):
        made.append(
            TraceRequest(
                f"{name}{turn}",
                start_s + 10.0 * turn,
                512 * (turn + 1),
                20,
                blocks=tuple(hash(name) % 1000 * 10 + at for at in range(turn + 1)),
                session=name,
                tenant="acme",
                parent=f"{name}{turn - 1}" if turn else None,
                think_s=4.0 if turn else None,
            )
        )
    return made


def ordered(*parts: list[TraceRequest]) -> list[TraceRequest]:
    return sorted((one for part in parts for one in part), key=lambda one: one.arrival_s)


ROWS = ordered(session("a", 0.0), session("b", 3.0), session("c", 5.0))


def hit_ratio(rows: list[TraceRequest]) -> float:
    cache = IdealCache()
    return sum(cache.look_up(row).hit_tokens for row in rows) / sum(o.input_tokens for o in rows)


def test_a_slice_begins_at_0_and_waits_for_nobody_outside() -> None:
    rows = list(cut(ROWS, from_s=5.0, to_s=20.0))
    assert [(row.id, row.arrival_s) for row in rows] == [
        ("c0", 0.0), ("a1", 5.0), ("b1", 8.0), ("c1", 10.0),
    ]  # fmt: skip
    assert [(row.parent, row.think_s) for row in rows] == [
        (None, None), (None, None), (None, None), ("c0", 4.0),
    ]  # fmt: skip
    assert len(list(cut(ROWS, first=2))) == 2


def test_a_scale_divides_time_and_keeps_every_request() -> None:
    rows = list(scale(ROWS, 4.0))
    assert [row.id for row in rows] == [row.id for row in ROWS]
    assert rows[-1].arrival_s == ROWS[-1].arrival_s / 4
    assert rows[-1].think_s == 1.0
    assert [replace(row, arrival_s=0, think_s=None) for row in rows] == [
        replace(row, arrival_s=0, think_s=None) for row in ROWS
    ]


def test_a_merge_keeps_traces_apart_unless_they_share() -> None:
    apart = list(merge([ROWS, shift(ROWS, 1.0)]))
    assert [one.arrival_s for one in apart] == sorted(one.arrival_s for one in apart)
    assert len({one.id for one in apart}) == 2 * len(ROWS)
    assert hit_ratio(apart) == pytest.approx(hit_ratio(ROWS))
    assert next(one for one in apart if one.id == "2/a1").parent == "2/a0"
    assert hit_ratio(list(merge([ROWS, ROWS], shared=True))) > hit_ratio(ROWS)
    with pytest.raises(InputError, match="--shift -1: request 'a0' would arrive at -1 s"):
        list(shift(ROWS, -1.0))


@pytest.mark.parametrize("seed", range(5))
def test_thinning_and_sampling_keep_whole_sessions(seed: int) -> None:
    many = ordered(*(session(f"s{n}", float(n)) for n in range(200)))
    kept = list(thin(many, 0.3, seed))
    names = {one.session for one in kept}
    assert 35 <= len(names) <= 85
    assert kept == [one for one in many if one.session in names]
    drawn = list(sample(many, 20, seed))
    names = {one.session for one in drawn}
    assert len(names) == 20
    assert drawn == [one for one in many if one.session in names]
    with pytest.raises(InputError, match="--sample 201: the trace has 200"):
        sample(many, 201, seed)


def test_a_cap_keeps_the_beginning_of_prompts() -> None:
    rows = list(cap(ROWS, input_tokens=600, output_tokens=5))
    assert max(row.input_tokens for row in rows) == 600
    assert {row.output_tokens for row in rows} == {5}
    assert hit_ratio(rows) > 0.3
    assert [one.id for one in cap(ROWS, input_tokens=600, drop=True)] == ["a0", "b0", "c0"]


def test_anonymous_traces_share_as_before_and_hold_no_text() -> None:
    secret = "Patient Jane Roe, born 1 May 1980. " * 80
    rows = [
        TraceRequest("x", 0.0, 700, 9, text=secret, tenant="clinic", session="roe"),
        TraceRequest(
            "y", 1.0, 800, 9, session="roe", parent="x", think_s=1.0,
            messages=({"role": "user", "content": secret},),
            tools=({"name": "records"},), parameters={"stop": "Roe", "temperature": 0.5},
        ),
        TraceRequest("z", 2.0, 720, 9, text=secret + "What now?", document="jane.pdf"),
    ]  # fmt: skip
    found = list(anonymise(rows, "0123456789abcdef"))
    text = repr(found).lower()
    assert not any(word in text for word in ("jane", "roe", "clinic", "records", "1980"))
    assert found[1].parent == found[0].id
    assert found[1].parameters == {"temperature": 0.5}
    assert found[0].blocks is not None
    assert found[2].blocks is not None
    assert found[0].blocks[0] == found[2].blocks[0]
    assert found[0].blocks[1] != found[2].blocks[1]
    assert found == list(anonymise(rows, "0123456789abcdef"))
    assert list(anonymise(rows, "another key 1234")) != found
    assert hit_ratio(list(anonymise(ROWS))) == pytest.approx(hit_ratio(ROWS))


def test_text_that_differs_at_its_very_end_has_other_blocks() -> None:
    long = "word " * 900  # more bytes than four a token
    rows = [TraceRequest(str(n), float(n), 900, 1, text=long + str(n)) for n in range(2)]
    one, other = (request.blocks for request in anonymise(rows, "0123456789abcdef"))
    assert one is not None
    assert other is not None
    assert one[0] == other[0]
    assert one[-1] != other[-1]


def test_a_model_of_text_knows_what_prompts_share() -> None:
    shared = "The river and its mill. " * 200
    rows = [
        TraceRequest(f"t{n}", float(n), 1300, 5, text=f"{shared}{n} {'why ' * 100}")
        for n in range(60)
    ]
    found = describe(synthesise(fit(rows), requests=200, seed=0))
    assert found.ideal_hit_ratio == pytest.approx(1024 / 1300, abs=0.03)


def test_verbs_compose_in_pipes(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", ROWS)
    forebay = f"{sys.executable} -m forebay.proxy traces"
    line = (
        f"{forebay} edit {tmp_path}/t.jsonl --slice ..25 --speed 2 --shift 1"
        f" | {forebay} edit --anonymise --cap output_tokens=7 | {forebay} export csv"
    )
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    rows = ran.stdout.splitlines()
    assert rows[0].startswith("id,arrival_s,input_tokens,output_tokens")
    assert [row.split(",")[1:4] for row in rows[1:3]] == [
        ["1.0", "512", "7"], ["2.5", "512", "7"],
    ]  # fmt: skip
    assert len(rows) == 1 + len([one for one in ROWS if one.arrival_s < 25])


@pytest.mark.parametrize(
    ("steps", "arrivals"),
    [
        ("--slice 10..20 --speed 2", ["b1", "c1"]),
        ("--speed 2 --slice 10..20", ["b2", "c2"]),
        ("--shift 2 --slice=5.. --first 2", ["b0", "c0"]),
        ("--first 2 --slice 1..", ["b0"]),
    ],
)
def test_steps_are_done_in_the_order_given(steps: str, arrivals: list[str], tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl", ROWS)
    printed("traces", "edit", tmp_path / "t.jsonl", *steps.split(), "-o", tmp_path / "out.jsonl")
    assert [row.id for row in read_trace(tmp_path / "out.jsonl")][-len(arrivals) :] == arrivals
    facts = json.loads((tmp_path / "out.jsonl.meta.json").read_bytes())
    names = [name for name, _ in facts["parameters"]["steps"]]
    assert names == [word[2:].partition("=")[0] for word in steps.split() if word[:2] == "--"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["edit", "{}"], "give a step, such as --slice"),
        (["edit", "{}", "--rate", "-1"], "--rate -1: give more than 0"),
        (["edit", "{}", "--speed", "nan"], "--speed nan: give more than 0"),
        (["edit", "{}", "--slice", "900.."], "no request is left"),
        (["edit", "{}", "--slice", "9..2"], "--slice 9..2: give FROM..TO"),
        (["edit", "{}", "--slice", "x"], "--slice x: give FROM..TO"),
        (["edit", "{}", "--drop", "input_tokens=9"], "no request is left"),
        (["edit", "{}", "--thin", "2"], "--thin 2: not a share"),
        (["edit", "{}", "--cap", "prompt=9"], "--cap prompt=9: give NAME=TOKENS"),
        (["edit", "{}", "--cap", "context=1"], "--cap context=1: give NAME=TOKENS"),
        (["edit", "{}", "--sample", "0"], "--sample 0: give more than 0"),
        (["edit", "{}", "--spread", "3"], "--spread: "),
        (["edit", "{}", "--spread", "soon"], "--spread soon: give a time"),
        (["merge", "{}"], "give two traces or more"),
        (["export", "xml", "{}"], "no export format 'xml'; one of: mooncake, aiperf, guidellm"),
        (["synth", "model", "{}", "-o", "{}.out"], "not a model of traces fit"),
    ],
)
def test_a_mistake_with_a_verb_is_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, ROWS)
    given = [word.format(path) for word in words]
    out = [] if "-o" in given else ["-o", f"{path}.out"]
    said = refusal("traces", *given, *out)
    assert says in said
    assert list(tmp_path.iterdir()) == [path]


JSON_WORDS = (
    *("edit {} --slice 5.. --speed 2 --thin 0.9", "edit {} --cap input_tokens=600 --first 30"),
    *("edit {} --spread 3 --sample 2", "merge {} {}", "export csv {}", "fit {}"),
)


@pytest.mark.parametrize("line", JSON_WORDS)
def test_what_was_written_is_told_as_json(line: str, tmp_path: Path) -> None:
    path, out = tmp_path / "t.jsonl", tmp_path / "out"
    write_trace(path, [TraceRequest(f"r{at}", 3.0 * (at // 4), 900, 20) for at in range(40)])
    words = ["traces", *line.format(path, path).split(), "--json"]
    assert refusal(*words) == (
        "forebay traces: --json: standard output has the rows already (-o -); give -o FILE, or "
        "leave out --json"
    )
    told = json.loads(printed(*words, "-o", out))
    assert told["command"] == words[1]
    if words[1] in ("export", "fit"):
        assert told["requests"] == 40
        return
    rows = list(read_trace(out))
    assert told == json.loads(Path(f"{out}.meta.json").read_bytes())
    assert [told[key] for key in ("requests", "input_tokens", "output_tokens")] == [
        len(rows), sum(row.input_tokens for row in rows), sum(row.output_tokens for row in rows),
    ]  # fmt: skip


def test_exports_read_back_as_the_same_trace(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"".join(export("aiperf")(ROWS)))
    back = list(open_trace(path, options=ReadOptions(mode="cumulative")))

    def key(one: TraceRequest) -> tuple[object, ...]:
        return (one.session or "", one.input_tokens, one.output_tokens, one.blocks, one.think_s)

    assert sorted(map(key, back)) == sorted(map(key, ROWS))
    path.write_bytes(b"".join(export("mooncake")(ROWS)))
    assert [(one.arrival_s, one.input_tokens, one.blocks) for one in open_trace(path)] == [
        (one.arrival_s, one.input_tokens, one.blocks) for one in ROWS
    ]
    path.write_bytes(b"".join(export("csv")(ROWS)))
    assert detect(path) == "forebay-csv"
    assert list(open_trace(path)) == [
        replace(one, blocks=None, parent=None, think_s=None) for one in ROWS
    ]
    (line, *_) = export("guidellm")(ROWS)
    row = json.loads(line)
    assert (len(row["prompt"]), row["prompt_tokens_count"]) == (4 * 512, 512)


def test_small_blocks_are_joined_for_mooncake(tmp_path: Path) -> None:
    ids = tuple(range(40))
    rows = [
        TraceRequest("a", 0.0, 640, 1, blocks=ids, block_tokens=16),
        TraceRequest("b", 1.0, 640, 1, blocks=(*ids[:33], *range(90, 97)), block_tokens=16),
    ]
    found = [json.loads(line)["hash_ids"] for line in export("mooncake")(rows)]
    assert found == [[31, 39], [31, 96]]


@needs_data
@pytest.mark.parametrize(
    ("name", "rate", "variation", "hits"),
    [
        ("mooncake_conversation_head.jsonl", 0.04, 0.1, 0.03),
        ("mooncake_synthetic_head.jsonl", 0.04, 0.1, 0.05),
    ],
)
def test_a_model_makes_more_of_the_same(
    name: str, rate: float, variation: float, hits: float, tmp_path: Path
) -> None:
    rows = list(open_trace(TRACES / name))
    if "conversation" in name:
        rows = list(spread_ticks(rows, seed=0))
    path = tmp_path / "model.json"
    path.write_bytes(write_model(fit(rows)))
    wanted, found = describe(rows), describe(synthesise(read_model(path), seed=1))
    assert wanted.rate_per_s is not None
    assert wanted.interarrival_cv is not None
    assert found.rate_per_s == pytest.approx(wanted.rate_per_s, rel=rate)
    assert found.interarrival_cv == pytest.approx(wanted.interarrival_cv, rel=variation)
    assert found.ideal_hit_ratio == pytest.approx(wanted.ideal_hit_ratio, abs=hits)
    assert found.input_tokens.mean == pytest.approx(wanted.input_tokens.mean, rel=0.1)
    assert found.output_tokens.mean == pytest.approx(wanted.output_tokens.mean, rel=0.1)


def test_a_model_of_turns_without_blocks_keeps_their_lengths() -> None:
    """Turns of 900 and 100 tokens in turn: nothing says that a turn holds the one before."""
    rows = [
        TraceRequest(f"t{n}", float(n), 900 if n % 2 else 100, 5, session=f"s{n // 6}")
        for n in range(600)
    ]
    found = describe(synthesise(fit(rows), requests=2000, seed=0))
    assert found.input_tokens.mean == pytest.approx(500, rel=0.05)
    assert found.ideal_hit_ratio == 0


def test_a_model_keeps_sessions_and_think_times() -> None:
    many = ordered(*(session(f"s{n}", 2.0 * n, 1 + n % 5) for n in range(300)))
    made = list(synthesise(fit(many), requests=500, seed=3))
    turns = [one for one in made if one.parent is not None]
    assert {turn.think_s for turn in turns} == {4.0}
    names = {one.id: one for one in made}
    for one in turns:
        before = names[one.parent or ""]
        assert before.session == one.session
        assert one.input_tokens == before.input_tokens + 512
        assert before.blocks == (one.blocks or ())[: len(before.blocks or ())]
    assert made == list(synthesise(fit(many), requests=500, seed=3))


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the example of docs/how-to/bring-your-traffic.md as its package would."""
    page = (ROOT / "docs/how-to/bring-your-traffic.md").read_text()
    source = page.partition("```python\n")[2].partition("```")[0]
    module = type(sys)("forebay_haproxy")
    exec(compile(source, "forebay_haproxy.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "forebay_haproxy", module)
    entry = EntryPoint("haproxy", "forebay_haproxy:haproxy", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    registry.formats.cache_clear()
    yield
    registry.formats.cache_clear()


@pytest.mark.usefixtures("plug_in")
def test_the_plug_in_of_the_docs_adds_a_format(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.csv"
    path.write_text("haproxy_ts,tokens_in,tokens_out\n1764000000,40,5\n1764000002,50,6\n")
    assert "haproxy" in printed("traces", "formats")
    printed("traces", "import", "auto", path, "-o", tmp_path / "t")
    assert [one.arrival_s for one in read_trace(tmp_path / "t")] == [0.0, 2.0]


def test_a_broken_plug_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "no_such_module:FORMAT", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    registry.formats.cache_clear()
    try:
        with pytest.raises(InputError, match=r"plug-in broken .* cannot be loaded: No module"):
            registry.formats()
    finally:
        registry.formats.cache_clear()
