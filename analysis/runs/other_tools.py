"""Read the result files of other load generators as runs, so that `compare` and `report` take them.

The readers of `forebay traces` (`formats/readers/tools.py`) read each file. A file with several
results is read as its last result, or as the result named in FILE#N.

Their times count from when a request was sent, and a request that waited for their own concurrency
limit was sent late. `vllm bench` keeps that wait, guidellm and some versions of inference-perf the
time that a request was meant for: both are added here. The others do not, and such a run notes it.
Requests that were never sent are in none of these files.
"""

from pathlib import Path

from forebay.analysis.runs.run import RunData
from forebay.analysis.runs.sources.rows import FileOrigin, FileRow, run_of_rows
from forebay.traces.formats import (
    FOREBAY,
    MeasuredRequest,
    TraceFormat,
    detect,
    head_of,
)
from forebay.traces.formats.served import result_format, served_results
from forebay.traces.formats.totals import is_table, refuse_without_requests
from forebay.traces.ground.buckets import DEFAULT_BUCKETS, bucket_of
from forebay.traces.ground.errors import InputError

FROM_SENDING = "times count from when a request was sent, not from when it was due"
VLLM = "vllm bench serve"
TPOT = "(E2E - TTFT) / (output tokens - 1)"
DIFFERS: dict[str, dict[str, str]] = {
    VLLM: {
        "ttft": "from sending; a wait for --max-concurrency is added where the file has it",
        "stall": "longest gap between chunks; not the wait for the first",
    },
    "guidellm": {
        "ttft": "to the first line with content",
        "e2e": "to the end of the stream, with usage and [DONE]",
    },
    "aiperf": {"ttft": "from sending", "e2e": "from sending"},
    "genai-perf": {"ttft": "from sending", "e2e": "from sending"},
    "inference-perf": {"e2e": "to the end of the call, with the time to tokenise the answer"},
}
"""How each tool defines a figure otherwise than a run folder does, by the key of the figure."""


def load_result(path: Path, name: str | None = None, number: int | None = None) -> RunData:
    """Read one result file as a run.

    Args:
        number: place of the result in the file, from 1. None is the last result.

    Raises:
        InputError: the file is damaged, or not a result. The error names the command to use.
    """
    tool = _tool(path)
    made_by = VLLM if tool.name == "vllm-bench" else tool.name
    notes: list[str] = []
    results = served_results(path, tool, notes)
    if not results:
        raise InputError(
            f"{path}: holds no requests; check that it is the file with every request of {made_by}"
        )
    if number is not None and not 1 <= number <= len(results):
        raise InputError(f"{path}#{number}: the file holds {len(results)} results, from #1")
    chosen = number or len(results)
    numbers, served = list(results.items())[chosen - 1]
    appended = len({document for document, _ in results}) > 1
    if len(results) > 1 and (appended or number is not None):
        choice = f"FILE#1 to FILE#{len(results)} choose one"
        notes.append(f"result {chosen} of {len(results)} in the file; {choice}")
    if all(request.wait_s is None for request in served):  # the file lacks the due times
        notes.append(FROM_SENDING)
    if numbers[1] is not None:  # the file has the requests by outcome
        served.sort(key=lambda request: request.due_s + (request.wait_s or 0.0))
    differs = {"tpot": TPOT, **DIFFERS.get(made_by, {})}
    origin = FileOrigin(made_by, differs, tuple(notes), unix=made_by != VLLM)
    return run_of_rows(path, name, origin, map(_row, served))


def _tool(path: Path) -> TraceFormat:
    """Return the reader of a result file (InputError: another file, with the right command)."""
    if (tool := result_format(path)) is not None:
        return tool
    name = detect(path)
    if name is None:
        refuse_without_requests(path)
        what = "a table" if is_table(head_of(path)) else "a file"
        raise InputError(
            f"{path}: {what}; give a run folder, or a result of `vllm bench serve`, aiperf "
            "(profile_export.jsonl), guidellm, inference-perf "
            "(per_request_lifecycle_metrics.json) or genai-perf (profile_export.json), a usage "
            "ledger or JSON log of the proxy, an .hlog or an .hgrm"
        )
    what = "a trace or a capture" if name == FOREBAY else f"a file of {name}"
    raise InputError(
        f"{path}: {what} has no results; `forebay replay` or `simulate` it, or read "
        "`forebay traces describe`"
    )


def _row(served: MeasuredRequest) -> FileRow:
    """Make a row of a run. Times count from when the request was due."""
    ok = served.e2e_s is not None
    wait_s, ttft_s, output = served.wait_s or 0.0, served.ttft_s, served.output_tokens
    tpot_s = None
    if served.e2e_s is not None and ttft_s is not None and output is not None and output > 1:
        tpot_s = (served.e2e_s - ttft_s) / (output - 1)
    return {
        "bucket": bucket_of(int(served.input_tokens), DEFAULT_BUCKETS) or "other",
        "outcome": "ok" if ok else "failed",
        "reason": None if ok else "unknown",
        "input_tokens": served.input_tokens,
        "prompt_tokens": served.input_tokens if ok else None,
        "output_tokens": output if ok else None,
        "intended_s": served.due_s,
        "sent_s": served.due_s + wait_s,
        "ttft_service_s": ttft_s,
        "ttft_response_s": None if ttft_s is None else ttft_s + wait_s,
        "e2e_response_s": None if served.e2e_s is None else served.e2e_s + wait_s,
        "tpot_s": tpot_s,
        "stall_s": served.stall_s if ok else None,
    }
