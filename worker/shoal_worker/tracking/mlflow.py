"""MLflow: a run's progress as one MLflow run, at MLFLOW_TRACKING_URI.

The MLflow run is found by a tag with the run's key, or created. A rank that replaces a dead one,
and a resumed run, therefore continue the same MLflow run. MLflow cannot delete points: repeated
steps have points of both attempts, and the later points count.

The sink imports mlflow and calls it on a separate thread, so that neither the import nor a slow or
unreachable tracking server delays training. The training thread queues its reports for this thread;
if a rank is killed, the queue is lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from shoal_common.errors import ConfigurationError, UnavailableError

from shoal_worker.tracking.tracker import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

_KEY_TAG: Final = "shoal.run"
_JOB_TAG: Final = "shoal.job"
_EVENT_TAG: Final = "shoal.newest_event"
_MOST_WAITING: Final = 1_000
"""Maximum number of points and texts not yet sent to MLflow. Beyond this number the sink is
abandoned."""
_CLOSE_S: Final = 30.0
"""Time for which the end of a run waits until the queue is empty."""

_Task = Callable[["MlflowClient", str], object]
"""Function called with the client and the MLflow run's id."""


class MLflow:
    """Writes a run's progress to MLflow. Pass it to `shoal.track`."""

    def __init__(self, experiment: str) -> None:
        """Creates the sink. `experiment`: name of the MLflow experiment, which is created if it
        does not exist.

        Raises ConfigurationError if the package is not installed, or the name is empty.
        """
        if find_spec("mlflow") is None:
            raise ConfigurationError(
                "shoal.MLflow needs the package mlflow-skinny or mlflow; install one with `pip "
                "install 'shoal[mlflow]'`"
            )
        if not experiment:
            raise ConfigurationError("shoal.MLflow(''): expected the name of an experiment")
        self._experiment = experiment
        self._writer: _Writer | None = None

    def open(self, *, run: TrackedRun, step: int) -> None:
        """Continues the MLflow run of this run, or creates it."""
        self._writer = _Writer(self._experiment, run)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point for each value."""
        now_ms, points = time.time_ns() // 1_000_000, dict(values)

        def log(client: MlflowClient, run_id: str) -> None:
            from mlflow.entities import Metric

            client.log_batch(
                run_id,
                metrics=[Metric(name, value, now_ms, step) for name, value in points.items()],
            )

        self._opened.put(log)

    def event(self, step: int, text: str) -> None:
        """Sets a tag of the MLflow run to the newest event."""
        self._opened.put(
            lambda client, run_id: client.set_tag(run_id, _EVENT_TAG, f"step {step}: {text}")
        )

    def flush(self) -> None:
        """Does nothing: data is sent as soon as MLflow accepts it."""

    def close(self, *, ended: bool) -> None:
        """Closes the sink. `ended`: True if this rank's part of the run has ended. The MLflow run
        is then marked as finished, after all reports were sent; a rank that continues the run marks
        it as running again. Otherwise the remaining reports are sent in the background."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if ended:
            writer.finish()
        else:
            writer.put(None)

    @property
    def _opened(self) -> _Writer:
        assert self._writer is not None, "the sink must be open"
        return self._writer


class _Writer:
    """The thread that sends the reports of one opening. The next call raises the thread's error."""

    def __init__(self, experiment: str, run: TrackedRun) -> None:
        self._tasks: queue.Queue[_Task | None] = queue.Queue(_MOST_WAITING)
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._write, args=(experiment, run), name="shoal-mlflow", daemon=True
        )
        self._thread.start()

    def put(self, task: _Task | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            raise UnavailableError(
                f"{_MOST_WAITING} points and texts are waiting to be written to MLflow; expected "
                "it to accept them faster"
            ) from None

    def finish(self) -> None:
        self.put(lambda client, run_id: client.set_terminated(run_id, "FINISHED"))
        self.put(None)
        self._thread.join(_CLOSE_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise UnavailableError(
                f"waited {_CLOSE_S:g} s for MLflow to accept the rest of the run"
            )

    def _write(self, experiment: str, run: TrackedRun) -> None:
        try:
            from mlflow import MlflowClient

            client = MlflowClient()
            run_id = _run_id(client, experiment, run)
            while (task := self._tasks.get()) is not None:
                task(client, run_id)
        except Exception as error:  # the tracker logs it once
            self._error = error


def _run_id(client: MlflowClient, experiment: str, run: TrackedRun) -> str:
    """Returns the id of the MLflow run of this run, and marks the MLflow run as running."""
    experiment_id = _experiment_id(client, experiment)
    found = client.search_runs(
        [experiment_id],
        filter_string=f"tags.`{_KEY_TAG}` = '{run.key}'",
        order_by=["attributes.start_time ASC"],
    )
    if found:
        run_id: str = found[0].info.run_id
        client.update_run(run_id, status="RUNNING")
        return run_id
    tags: dict[str, Any] = {_KEY_TAG: run.key, **({_JOB_TAG: run.job} if run.job else {})}
    return str(client.create_run(experiment_id, tags=tags, run_name=run.job or None).info.run_id)


def _experiment_id(client: MlflowClient, name: str) -> str:
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run has created it meanwhile
            known = client.get_experiment_by_name(name)
            if known is None:
                raise
    return str(known.experiment_id)
