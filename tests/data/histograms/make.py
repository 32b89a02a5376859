"""HdrHistogram for Python writes python.hlog and python.hgrm: see README.md.

Its functions for the start time of a log raise AttributeError, so the log has none.
"""

import sys
from pathlib import Path

from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogWriter

RANGE = 1, 3_600_000_000_000, 3
folder = Path(sys.argv[1])
whole = HdrHistogram(*RANGE)
with (folder / "python.hlog").open("w") as stream:
    log = HistogramLogWriter(stream)
    log.output_log_format_version()
    log.output_legend()
    for second in range(4):
        interval = HdrHistogram(*RANGE)
        for i in range(500 * second, 500 * (second + 1)):
            interval.record_value(1_000 * (100 + i * i * 7_919 % 5_000_000))
        start_ms = 1_700_000_000_000 + 1_000 * second
        log.output_interval_histogram(interval, start_ms / 1e3, start_ms / 1e3 + 1)
        whole.add(interval)
with (folder / "python.hgrm").open("wb") as stream:
    whole.output_percentile_distribution(stream, 1e6, 5)
