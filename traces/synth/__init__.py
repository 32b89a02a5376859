"""Make traces: from parameters, from a model of a recorded trace, or from published files.

In reading order: `lengths`, `arrivals` and `ticks` are the distributions. `documents` makes
sessions and questions about documents, `chat_beside_documents` makes both at once,
`agents` makes sessions of coding agents. `fit_model` fits a `model` to a trace and `from_model`
makes a trace from it. `fetch` downloads published traces, `prompts` makes prompts whose answers can
be scored. The room imports `edit` and below.
"""
