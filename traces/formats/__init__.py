"""The trace formats. To add one, write a function from a row to a request, under `row_format`.

In reading order: `table` defines `TraceFormat` and chooses a format by the `head` of a file,
`readers` has a file for each family of formats, `body` reads the JSON bodies that many formats
contain, `usage` the token counts in them, `columns` reads any table by a mapping of its columns,
`guess` finds that mapping, and `totals` recognises files without requests, such as the summaries of
load tools, and `served` reads how requests were answered. The room imports `reading` and below.

The names below are public: plug-ins import them from here.
"""

from forebay.traces.formats.head import Head, head_of
from forebay.traces.formats.table import (
    COMPLETION,
    DEFAULTS,
    FOREBAY,
    GROUP,
    MODES,
    MeasuredRequest,
    ReadOptions,
    TraceFormat,
    detect,
    formats,
    names,
    open_trace,
    row_format,
    trace_format,
)

__all__ = [
    "COMPLETION",
    "DEFAULTS",
    "FOREBAY",
    "GROUP",
    "MODES",
    "Head",
    "MeasuredRequest",
    "ReadOptions",
    "TraceFormat",
    "detect",
    "formats",
    "head_of",
    "names",
    "open_trace",
    "row_format",
    "trace_format",
]
