"""MLflow sink: records a run's progress as one MLflow run, on the server at MLFLOW_TRACKING_URI.

The MLflow run has a tag with the run's key. The sink looks for this tag, and creates an MLflow run
only if there is none. A rank that replaces a dead rank, and a resumed run, therefore continue the
same MLflow run. MLflow cannot delete points, so repeated steps keep their first values: another
tag, which is set in the same request as the points, contains the newest step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError

from shoal_worker.tracking.sinks import Event, Points, Report, TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_KEY_TAG: Final = "shoal.run"
_JOB_TAG: Final = "shoal.job"
_STEP_TAG: Final = "shoal.step"
_EVENT_TAG: Final = "shoal.event"
"""Prefix of the tags for events, followed by the event's step and kind."""
_MOST_TAGS: Final = 90
_MOST_METRICS: Final = 900
"""Limits for one request. MLflow rejects requests with more than 100 tags or 1000 metrics."""


class MLflow:
    """Writes a run's progress to MLflow. Pass it to `shoal.track`."""

    on_every_rank = False

    def __init__(self, experiment: str) -> None:
        """Creates the sink. `experiment`: name of the MLflow experiment, which is created if it
        does not exist.

        Raises ConfigurationError if the package is not installed, or the name is empty.
        """
        if not experiment:
            raise ConfigurationError("shoal.MLflow(''): expected the name of an experiment")
        try:
            # the import takes seconds, and would later delay steps by holding the interpreter's
            # lock
            import mlflow  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "shoal.MLflow needs the package mlflow-skinny or mlflow; install one with `pip "
                "install 'shoal[mlflow]'`"
            ) from error
        self._experiment = experiment
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._newest = 0
        """Newest step that MLflow contained when the sink was opened."""

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Continues the MLflow run that belongs to `run`, or creates it."""
        from mlflow import MlflowClient

        self._client = client = MlflowClient()
        found = _continued(client, _experiment_id(client, self._experiment), run)
        self._run_id = str(found.info.run_id)
        self._newest = _newest_step(client, found)

    def write(self, reports: Sequence[Report]) -> None:
        """Writes points as metrics, and each event as a tag `shoal.event.<step>.<kind>`."""
        from mlflow.entities import Metric, RunTag

        assert self._client is not None, "the sink must be open"
        for part in _parts(reports):
            metrics = [
                Metric(name, value, report.time_ns // 1_000_000, report.step)
                for report in part
                if isinstance(report, Points) and report.step > self._newest
                for name, value in report.values.items()
            ]
            tags = [
                RunTag(f"{_EVENT_TAG}.{report.step:09d}.{report.kind}", report.text)
                for report in part
                if isinstance(report, Event)
            ]
            if metrics:
                newest = max(metric.step for metric in metrics)
                tags.append(RunTag(_STEP_TAG, str(newest)))
            if metrics or tags:
                self._client.log_batch(self._run_id, metrics=metrics, tags=tags)

    def close(self, *, ended: bool) -> None:
        """Closes the sink. `ended`: True if this rank is leaving the run. The MLflow run is then
        marked as finished; a rank that continues the run marks it as running again."""
        client, self._client = self._client, None
        if client is not None and ended:
            client.set_terminated(self._run_id, "FINISHED")


def _parts(reports: Sequence[Report]) -> Iterator[list[Report]]:
    """Splits reports into parts that MLflow accepts in one request each."""
    part: list[Report] = []
    metrics = 0
    for report in reports:
        more = len(report.values) if isinstance(report, Points) else 0
        if part and (metrics + more > _MOST_METRICS or len(part) >= _MOST_TAGS):
            yield part
            part, metrics = [], 0
        part.append(report)
        metrics += more
    if part:
        yield part


def _continued(client: MlflowClient, experiment_id: str, run: TrackedRun) -> Run:
    """Returns the MLflow run that belongs to `run`, and marks it as running. Creates it if it does
    not exist."""
    found = client.search_runs(
        [experiment_id],
        filter_string=f"tags.`{_KEY_TAG}` = '{run.key}'",
        order_by=["attributes.start_time ASC"],
    )
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return found[0]
    tags: dict[str, Any] = {_KEY_TAG: run.key, **({_JOB_TAG: run.job} if run.job else {})}
    return client.create_run(experiment_id, tags=tags, run_name=run.job or None)


def _newest_step(client: MlflowClient, run: Run) -> int:
    """Returns the newest step that an MLflow run contains."""
    if tag := run.data.tags.get(_STEP_TAG):
        return int(tag)
    # A file store has an empty tag if the rank was killed while it wrote the tag.
    histories = (client.get_metric_history(run.info.run_id, name) for name in run.data.metrics)
    return max((point.step for history in histories for point in history), default=0)


def _experiment_id(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run has created it in the meantime
            known = client.get_experiment_by_name(name)
            if known is None:
                raise
    return str(known.experiment_id)
