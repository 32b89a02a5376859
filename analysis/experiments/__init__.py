"""The measurement studies of `forebay experiment`. `STUDIES` is their table.

A study is a module of `studies` that defines `HELP` and `command`, a Typer function that measures
the target and passes a `Result` to `finish`. Nothing else refers to the module.

In reading order: `cli` is the command, `study` the common part of all studies, `result` the folder
they write. `target` is the measured server. `systems` receive a load: simulated ones, and the
servers of `http_system`. `system_from_options` chooses. `one_load` measures a load, `load_stats`
sums it up, `gauges` are read meanwhile, `asking` sends single questions. The room imports `kv`,
`charts` and `statistics`.
"""

STUDIES = {
    "prefill": "forebay.analysis.experiments.studies.prefill",
    "decode": "forebay.analysis.experiments.studies.decode",
    "phases": "forebay.analysis.experiments.studies.phases",
    "hol": "forebay.analysis.experiments.studies.hol",
    "saturation": "forebay.analysis.experiments.studies.saturation",
    "shared-document": "forebay.analysis.experiments.studies.shared_document",
    "flood": "forebay.analysis.experiments.studies.flood",
    "kv": "forebay.analysis.experiments.studies.kv_study",
    "memory": "forebay.analysis.experiments.studies.memory",
    "needle": "forebay.analysis.experiments.studies.needle",
}
