"""An MLflow store of files, read as MLflow reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "digits"


def environment(directory: Path) -> dict[str, str]:
    """Returns variables that make MLflow write to `directory`, which it must be explicitly allowed
    to do. MLFLOW_STORE is for the tests only."""
    return {
        "MLFLOW_STORE": str(directory),
        "MLFLOW_TRACKING_URI": directory.as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def runs(directory: Path) -> list[Run]:
    """Returns all runs of the experiment."""
    client = _client(directory)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def points(directory: Path, run: Run, name: str) -> list[tuple[int, float]]:
    """Returns the steps and values of a metric in the order in which they were written."""
    return [
        (metric.step, metric.value)
        for metric in _client(directory).get_metric_history(run.info.run_id, name)
    ]


def _client(directory: Path) -> MlflowClient:
    # imported here because it takes seconds, and only readers of a store need it
    from mlflow import MlflowClient

    return MlflowClient(directory.as_uri())
