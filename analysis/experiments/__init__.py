"""The studies of `forebay experiment`: one module each, all named in `STUDIES`.

A study module holds `HELP` and `command`, a Typer function that asks the target, works out what
it says and hands a `Result` to `finish`. Nothing else needs to know of it.
"""

STUDIES = {
    "prefill": "forebay.analysis.experiments.prefill",
    "decode": "forebay.analysis.experiments.decode",
    "hol": "forebay.analysis.experiments.hol",
    "saturation": "forebay.analysis.experiments.saturation",
    "shared-document": "forebay.analysis.experiments.shared_document",
    "flood": "forebay.analysis.experiments.flood",
    "kv": "forebay.analysis.experiments.kv",
    "needle": "forebay.analysis.experiments.needle",
}
