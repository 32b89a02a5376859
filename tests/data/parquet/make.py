"""DuckDB, fastparquet and Polars write the Parquet files of this folder: python make.py FOLDER.

Each writer writes the same 12 requests with each kind of time; the codec is the writer's own for
that file. Made with duckdb 2.0.1, fastparquet 2026.9.0, polars 2.1.0 and pandas 3.1.1.
"""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import fastparquet
import pandas
import polars

START = datetime(2026, 11, 26, 8, tzinfo=UTC)
STEPS_MS = [at * at * 1_237 % 60_000 for at in range(12)]
KINDS = {
    "timestamp": [START + timedelta(milliseconds=at) for at in STEPS_MS],
    "naive": [(START + timedelta(milliseconds=at)).replace(tzinfo=None) for at in STEPS_MS],
    "float": [at / 1_000 for at in STEPS_MS],
    "milliseconds": [int(START.timestamp()) * 1_000 + at for at in STEPS_MS],
    "text": [(START + timedelta(milliseconds=at)).isoformat() for at in STEPS_MS],
}
CODECS = ("snappy", "zstd", "gzip", "uncompressed", "zstd")
folder = Path(sys.argv[1])
for codec, (kind, times) in zip(CODECS, KINDS.items(), strict=True):
    columns = {
        "started": times,
        "prompt_tokens": [100 + 7_919 * at % 90_000 for at in range(12)],
        "completion_tokens": [at * 31 % 400 for at in range(12)],
        "team": [f"team\r{at % 3}" for at in range(12)],
    }
    frame = pandas.DataFrame(columns)
    none = None if codec == "uncompressed" else codec.upper()
    fastparquet.write(folder / f"fastparquet-{kind}.parquet", frame, compression=none)
    polars.DataFrame(columns).write_parquet(folder / f"polars-{kind}.parquet", compression=codec)
    path = folder / f"duckdb-{kind}.parquet"
    duckdb.sql("SET TimeZone = 'UTC'")
    duckdb.sql(f"COPY (SELECT * FROM frame) TO '{path}' (FORMAT parquet, COMPRESSION {codec})")
