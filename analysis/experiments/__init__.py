"""The studies of `forebay experiment`: one module each, all listed in `STUDIES`.

A study module defines `HELP` and `command`, a Typer function that measures the target and passes
a `Result` to `finish`. Nothing else refers to the module.
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
