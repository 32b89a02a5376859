"""`forebay traces`: import, change, fetch, describe and make traces.

Data goes to standard output, messages go to standard error.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.traces.cli.edit import EDIT, edit_trace, merge_traces
from forebay.traces.cli.import_ import HEADINGS as IMPORT_HEADINGS
from forebay.traces.cli.import_ import export_trace, fit_model, import_trace, list_formats
from forebay.traces.cli.output import (
    Totals,
    check_output,
    print_description,
    print_result,
    report,
    write_whole,
)
from forebay.traces.cli.synth import app as synth_app
from forebay.traces.ground.command_line.help_text import PlainTyper
from forebay.traces.ground.command_line.messages import print_json, talk
from forebay.traces.ground.command_line.options import (
    Arrivals,
    AsJson,
    Force,
    FormatName,
    Output,
    Rate,
    Seed,
    SkipBad,
    one_or_more,
)
from forebay.traces.ground.errors import InputError
from forebay.traces.ground.schema import TraceRequest
from forebay.traces.ground.whole_file import answers_path, meta_path, refuse_existing
from forebay.traces.tokens import DEFAULT_ENCODING

app = PlainTyper(
    help="Import, change, describe and make traces.\n\n"
    "example:  forebay traces describe mooncake_trace.jsonl",
)
app.add_typer(synth_app, name="synth")

Tokens = Annotated[
    str,
    typer.Option(
        "--tokens",
        "--tokenizer",
        help="encoding, model or tokenizer.json to count with, or estimate",
    ),
]


app.command("import", headings=IMPORT_HEADINGS)(import_trace)
app.command("export")(export_trace)
app.command("formats")(list_formats)
app.command("fit")(fit_model)
app.command("edit", help=EDIT)(edit_trace)
app.command("merge")(merge_traces)


@app.command()
def fetch(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="name of the trace or task; without it, list them"),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--out", "-o", help="file to write; default: the published name")
    ] = None,
    url: Annotated[str | None, typer.Option(help="URL of a mirror")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Download a published trace or ZeroSCROLLS task.

    example:  forebay traces fetch mooncake-synthetic
    """
    from forebay.traces.synth import fetch as fetching

    if name is None:
        files = fetching.PUBLISHED.items()
        if as_json:
            print_json({title: file.url for title, file in files})
            return
        for title, file in files:
            size = "" if file.bytes is None else f"{file.bytes / 1e6:,.1f} MB"
            checked = "" if file.sha256 is None else "SHA-256 known"
            print(f"{title:<26} {size:>9}  {checked:<13}  {file.url}")
        return
    source = fetching.published(name)
    target = output or source.file_name
    if target == "-":
        raise InputError("--out -: the file is checked before you get it; name a file")
    refuse_existing([target], force=force)
    facts = fetching.fetch(source, target, url=url)
    line = f"{facts['bytes']:,} bytes, licence {facts['licence']} -> {target}"
    print_result(facts, line, as_json)
    if not as_json:
        talk(f"next:  {source.then.format(target).replace(' T', ' trace.jsonl')}")


@app.command()
def describe(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="trace file; - is stdin")],
    as_json: AsJson = False,
    format_name: FormatName = None,
    skip_bad: SkipBad = False,
) -> None:
    """Rates, burstiness, length quantiles and the ideal prefix hit ratio of a trace.

    example:  forebay traces describe mooncake_trace.jsonl --json
    """
    from forebay.traces.edit.describe import describe as measure
    from forebay.traces.formats import open_trace

    reader = open_trace(trace, format_name=format_name, skip_bad=skip_bad)
    result = measure(reader)
    if as_json:
        print_json(result.as_dict())
    else:
        print_description(trace, result)
    if reader.skipped:
        talk(f"{reader.skipped} bad rows skipped")


@app.command()
def zeroscrolls(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="zip file, directory or .jsonl file")
    ],
    output: Output,
    task: Annotated[str | None, typer.Option(help="the task, if the path does not name it")] = None,
    split: Annotated[str, typer.Option(help="test or validation")] = "test",
    form: Annotated[str, typer.Option(help="completions (input unchanged) or chat")] = (
        "completions"
    ),
    order: Annotated[str, typer.Option(help="file, grouped, shuffled or zipf")] = "file",
    zipf: Annotated[float, typer.Option(help="exponent of --order zipf")] = 0.8,
    context: Annotated[
        int | None,
        typer.Option(help="context in tokens; prompts are cut to fit it with their answers"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="most requests, counted in that order")] = None,
    tokens: Tokens = DEFAULT_ENCODING,
    arrivals: Arrivals = "poisson",
    rate: Rate = 1.0,
    seed: Seed = 0,
    skip_bad: SkipBad = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a trace from ZeroSCROLLS tasks: real documents, several questions about each.

    example:  forebay traces zeroscrolls squality.zip --order shuffled --rate 2 -o squality.jsonl
    """
    from forebay.traces.edit.sharing import IdealCache
    from forebay.traces.synth.prompts.zeroscrolls import by_document, read_task
    from forebay.traces.synth.prompts.zeroscrolls_trace import (
        has_references,
        ordered,
        reference_lines,
        to_trace,
    )
    from forebay.traces.tokens import counter

    # Check all options before the long read.
    one_or_more({"--context": context, "--limit": limit})
    check_output(output, meta_path(output), force=force, as_json=as_json)
    # Read the tasks, and put their samples in order.
    files = [read_task(path, task=task, split=split, skip_bad=skip_bad) for path in paths]
    for warning in (warning for file in files for warning in file.warnings):
        talk(f"warning: {warning}")
    count = counter(tokens)
    everything = [sample for file in files for sample in file.samples]
    samples = ordered(everything, order, seed=seed, zipf_s=zipf)[:limit]
    # A file of reference answers, if there are any.
    answered = output != "-" and has_references(samples)
    answers = (answers_path(output), reference_lines(samples)) if answered else None
    if answers is not None:
        refuse_existing([answers[0]], force=force)
    # Write the trace with the facts that are needed to make it again.
    pace: dict[str, Any] = {"arrivals": arrivals, "rate_per_s": rate, "seed": seed}
    requests = to_trace(samples, count, form=form, context_tokens=context, **pace)
    facts = {
        "command": "zeroscrolls",
        "sources": [
            {
                "task": file.task,
                "split": file.split,
                "path": file.path,
                "sha256": file.sha256,
                "rows": file.rows,
                "samples": len(file.samples),
                "skipped": file.skipped,
            }
            for file in files
        ],
        "documents": len(by_document(samples)),
        "form": form,
        "order": order,
        "zipf_s": zipf if order == "zipf" else None,
        "context_tokens": context,
        "tokens_by": count.name,
        **pace,
    }
    totals = Totals(requests, IdealCache())
    result = write_whole(output, totals, lambda: facts, answers)
    if answers is not None:
        talk(f"reference answers in {answers[0]}")
    talk(f"tokens counted by {count.name}")
    report(result, output, as_json)


@app.command()
def needle(
    output: Output,
    haystack: Annotated[
        list[str] | None,
        typer.Option(help='.jsonl of {"doc_id", "text"} rows; default: meaningless words'),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="prompt tokens, separated by commas")
    ] = "8192,32768,122880",
    depths: Annotated[
        str, typer.Option(help="from 0 (start) to 1 (end), separated by commas")
    ] = "0.1,0.5,0.9",
    questions: Annotated[int, typer.Option(help="questions for each haystack")] = 4,
    output_tokens: Annotated[int, typer.Option(help="tokens of each answer")] = 32,
    tokens: Tokens = DEFAULT_ENCODING,
    arrivals: Arrivals = "constant",
    rate: Rate = 1.0,
    seed: Seed = 0,
    answers: Annotated[
        str | None, typer.Option(help="file for expected answers; default: OUTPUT.answers.jsonl")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Hide a fact in a long text and ask for it. Expected answers go into a second file.

    example:  forebay traces needle --haystack stories.jsonl --lengths 8192,65536 -o needle.jsonl
    """
    from forebay.traces.synth.prompts.needle import (
        answer_line,
        generated_haystack,
        load_haystack,
        needle_requests,
    )
    from forebay.traces.tokens import counter

    if output == "-" and answers is None:
        raise InputError("--answers: a trace on standard output has no file beside it; name a file")
    # Check the files and the numbers.
    beside = Path(answers) if answers else answers_path(output)
    check_output(output, meta_path(output), beside, force=force, as_json=as_json)
    prompt_lengths = _numbers(lengths, "--lengths", int)
    shares = _numbers(depths, "--depths", float)
    # Take the haystack from files, or make one that is long enough.
    count = counter(tokens)
    if haystack:
        text = load_haystack(haystack)
    else:  # a third more than needed: with some vocabularies a word is less than a token
        text = generated_haystack(max(prompt_lengths, default=0) * 4 // 3, seed)
    layout: dict[str, Any] = {"lengths": prompt_lengths, "depths": shares, "questions": questions}
    pace: dict[str, Any] = {"arrivals": arrivals, "rate_per_s": rate, "seed": seed}
    pairs = needle_requests(text, count, output_tokens=output_tokens, **layout, **pace)
    # Collect the expected answers while the trace is written.
    expected: list[bytes] = []

    def prompts() -> Iterator[TraceRequest]:
        for request, answer in pairs:
            expected.append(answer_line(answer))
            yield request

    facts = {
        "command": "needle",
        "haystack": haystack,
        **layout,
        "answers": str(beside),
        "tokens_by": count.name,
        **pace,
    }
    result = write_whole(output, Totals(prompts()), lambda: facts, (beside, expected))
    talk(f"tokens counted by {count.name}; expected answers in {beside}")
    report(result, output, as_json)


def _numbers(text: str, option: str, kind: type[Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option}: {text!r} is not numbers separated by commas") from None
