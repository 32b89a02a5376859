"""Read one run folder: `summary.json`, `run.json` and `requests.parquet`.

Nothing is computed or written here. A file that is missing, damaged or not part of the run is an
InputError that names the file and the fix. A key that an older run lacks is None; every summary has
the number of requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from forebay.analysis.quantiles import Floats
from forebay.analysis.units import is_text, printable
from forebay.replay.summary import is_firm
from forebay.traces.errors import InputError

NUMBERS = (
    "input_tokens",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "intended_s",
    "sent_s",
    "ttft_response_s",
    "ttft_service_s",
    "e2e_response_s",
    "tpot_s",
    "stall_s",
    "queue_ms",
    "status",
    "retry_after_s",
    "reject_latency_s",
)
WORDS = ("bucket", "outcome", "reason", "backend")
NEEDED = frozenset({"bucket", "intended_s", "ttft_response_s", "outcome"})
OUTCOMES = frozenset({"ok", "rejected", "failed"})
NO_BUCKET = "other"  # requests longer than every bucket
MAX_NAME = 40  # characters of a run's name in a table

Words = NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of one run; `numbers` have NaN for null, `words` have "" for null."""

    path: Path
    name: str
    summary: Mapping[str, Any]
    info: Mapping[str, Any]
    numbers: Mapping[str, Floats]
    words: Mapping[str, Words]

    @property
    def requests(self) -> int:
        return len(self.words["outcome"])

    def buckets(self) -> list[str]:
        """The buckets that received a request, shortest prompts first."""
        names = sorted(set(self.words["bucket"].tolist()))
        return sorted(names, key=lambda name: (name == NO_BUCKET, self._median_tokens(name), name))

    def planned_buckets(self) -> list[str]:
        """All buckets of run.json, even without requests; none in an older run."""
        listed = self.info.get("buckets")
        names = [at_path(one, ("name",)) for one in listed] if isinstance(listed, list) else []
        return [printable(name) for name in names if isinstance(name, str)]

    def rows(self, bucket: str | None = None, outcome: str | None = None) -> NDArray[np.bool_]:
        """A mask of the requests of a bucket and outcome; None matches any."""
        mask = np.ones(self.requests, dtype=np.bool_)
        if bucket is not None:
            mask &= self.words["bucket"] == bucket
        if outcome is not None:
            mask &= self.words["outcome"] == outcome
        return mask

    def number(self, *keys: str) -> float | None:
        """A number of summary.json by its path; None if absent."""
        value = at_path(self.summary, keys)
        if value is None or value == "inf":
            return math.inf if value else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"{self.path / 'summary.json'}: {'.'.join(keys)} is {value!r}, not a number; "
                "repeat the run"
            )
        return float(value)

    def shown(self, *keys: str) -> float | None:
        """`number` for display: None for a percentile with too few samples beyond it."""
        count = self.number(*keys[:-1], "count")
        return self.number(*keys) if count is None or is_firm(keys[-1], int(count)) else None

    def _median_tokens(self, bucket: str) -> float:
        tokens = self.numbers["input_tokens"][self.rows(bucket)]
        tokens = tokens[~np.isnan(tokens)]
        return float(np.median(tokens)) if len(tokens) else math.inf


def from_sending(run: RunData) -> RunData:
    """Return the run with latencies from when requests were sent, not from when they were due.

    Requests for which that is not known keep theirs.
    """
    due, sent = run.numbers["ttft_response_s"], run.numbers["ttft_service_s"]
    late_s = np.nan_to_num(due - sent)
    shifted = {name: run.numbers[name] - late_s for name in ("ttft_response_s", "e2e_response_s")}
    return replace(run, numbers={**run.numbers, **shifted})


def at_path(tree: Any, keys: Sequence[str]) -> Any:
    """The value under nested keys; None if a key is missing."""
    for key in keys:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def load_run(path: Path, name: str | None = None) -> RunData:
    """Read a run folder, or the result file of another load generator.

    Raises:
        InputError: the folder is missing or not named in UTF-8, or a file is missing, damaged or
            not part of a run.
    """
    if not is_text(str(path)):
        raise InputError(f"{printable(str(path))}: its name is not UTF-8; rename it")
    if path.is_file():
        from forebay.analysis.foreign import load_foreign

        return load_foreign(path, name)
    if not path.is_dir():
        raise InputError(f"{path}: not there; give a run folder, as `forebay replay --out` writes")
    summary = _json(path / "summary.json")
    info = _json(path / "run.json")
    numbers, words = _columns(path / "requests.parquet")
    run = RunData(path, name or folder_name(path), summary, info, numbers, words)
    told = summary.get("requests")
    if type(told) is not int:
        raise InputError(f"{path / 'summary.json'}: has no number of requests; repeat the run")
    if told != run.requests:
        raise InputError(
            f"{path / 'summary.json'}: counts {told:,} requests, but requests.parquet has "
            f"{run.requests:,}; they are not of one run: repeat it"
        )
    return run


def load_runs(paths: Sequence[Path]) -> list[RunData]:
    """Read several runs and give each a unique name."""
    runs = [load_run(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    parents = [printable(f"{path.resolve().parent.name}/{path.resolve().name}") for path in paths]
    if len(set(parents)) < len(parents):
        parents = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return [
        RunData(run.path, name, run.summary, run.info, run.numbers, run.words)
        for run, name in zip(runs, parents, strict=True)
    ]


def folder_name(path: Path) -> str:
    name = printable(path.resolve().name) or "run"
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def _json(file: Path) -> Mapping[str, Any]:
    try:
        value = orjson.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise InputError(
            f"{file}: missing; the run did not finish, or this is no run folder"
        ) from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    except orjson.JSONDecodeError as error:
        raise InputError(f"{file}: damaged JSON ({error}); repeat the run") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}: holds {type(value).__name__}, not an object; repeat the run")
    return value


def _columns(file: Path) -> tuple[dict[str, Floats], dict[str, Words]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not file.is_file():
        raise InputError(f"{file}: missing; the run did not finish, or this is no run folder")
    try:
        with pq.ParquetFile(file) as parquet:
            there = set(parquet.schema_arrow.names)
            if missing := sorted(NEEDED - there):
                raise InputError(
                    f"{file}: no column {', '.join(missing)}; not the requests of a forebay run"
                )
            table = parquet.read(columns=[name for name in (*NUMBERS, *WORDS) if name in there])
    except (pa.ArrowException, OSError) as error:
        line = str(error).partition("\n")[0]
        raise InputError(f"{file}: damaged parquet ({line}); repeat the run") from error
    count = table.num_rows
    numbers, words = {}, {}
    for name in NUMBERS:
        values = np.full(count, np.nan)
        if name in there:
            try:
                values = table.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False)
            except pa.ArrowException as error:
                raise InputError(f"{file}: column {name} holds no numbers") from error
        numbers[name] = values
    for name in WORDS:
        texts = table.column(name).to_pylist() if name in there else [None] * count
        empty = NO_BUCKET if name == "bucket" else ""
        words[name] = np.array(
            [empty if text is None else printable(str(text)) for text in texts], dtype=object
        )
    if strange := sorted(set(words["outcome"].tolist()) - OUTCOMES):
        raise InputError(f"{file}: outcome {strange[0]!r}; one of: {', '.join(sorted(OUTCOMES))}")
    return numbers, words
