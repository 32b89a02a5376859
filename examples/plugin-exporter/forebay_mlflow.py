"""An exporter for Forebay: a run becomes an MLflow run, with parameters, figures and its files.

MLFLOW_TRACKING_URI names the server.
"""

from pathlib import Path
from typing import BinaryIO

import mlflow

from forebay.analysis.runs.load import load_run
from forebay.analysis.runs.otlp import figures
from forebay.traces.errors import InputError

PARAMETERS = ("model", "arrivals", "rate_per_s", "speed", "seed", "endpoint", "salt", "processes")


def export(run: Path, out: BinaryIO, tag: str) -> None:
    """Send a run folder, and write where it was sent. `tag` is for formats of one metric."""
    data = load_run(run)
    try:
        with mlflow.start_run(run_name=run.name) as started:
            mlflow.log_params({name: data.info.get(name) for name in PARAMETERS})
            mlflow.log_metrics({".".join(path): value for path, value in figures(data.summary)})
            mlflow.log_artifacts(str(run))
    except (mlflow.exceptions.MlflowException, OSError) as error:
        line = str(error).splitlines()[0]
        raise InputError(f"MLflow: {line}; set MLFLOW_TRACKING_URI") from error
    out.write(f"{mlflow.get_tracking_uri()} run {started.info.run_id}\n".encode())
