"""The optimizer of async_sgd: the servers run the user's, and a step is a push and a pull. The training thread calls it."""

from __future__ import annotations

from typing import Any, Protocol

from shoal_common.errors import PreconditionError

from shoal_worker.elastic.contract import StepStatus, StopTraining
from shoal_worker.strategies.elastic_optimizer import ElasticOptimizer


class Worker(Protocol):
    """What the optimizer asks of its model (`AsyncSGDModel`)."""

    @property
    def is_attached(self) -> bool:
        """The optimizer is known."""
        ...

    def look_at_schedule(self) -> object:
        """Notices what schedulers have changed."""
        ...

    def exchange(self, *, push: bool) -> None:
        """Ends an iteration."""
        ...

    def pull(self) -> None:
        """Brings back what all workers have reached."""
        ...


class AsyncSGDOptimizer(ElasticOptimizer):
    """The user's optimizer, as the servers run it: `step` pushes and pulls. Its state stays empty here.

    Settings changed in `param_groups`, by schedulers say, go to the servers with the next push. Of several workers' schedules the one that
    is furthest counts.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's optimizer's own. Reading them notices what has changed since."""
        model: Worker = self._model
        if model.is_attached:
            model.look_at_schedule()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def last_staleness(self) -> float:
        """Versions that others' pushes made between the pull that the last push was computed on and that push; the most of any
        partition."""
        return self._session.progress.staleness

    def _finish(self) -> StepStatus:
        """An iteration of this worker alone. Raises as `AsyncSGDModel.exchange`.

        COMMITTED, except when the run ended while the job stood still for want of workers: LOST.
        """
        try:
            return super()._finish()
        except StopTraining as stop:
            return self._session.give_up_step(stop)

    def _load(self, state: dict[str, Any]) -> None:
        """The settings, which go to the servers; what is momentum and moments in a synchronous run has no place on the workers."""
        super()._load({"state": {}, "param_groups": state.get("param_groups")})

    def _update(self, *, usable: bool) -> None:
        model: Worker = self._model
        model.exchange(push=usable)

    def synchronize_parameters(self) -> None:
        """Pulls what all workers have reached; between steps.

        Raises:
            PreconditionError: within one: the gradient at hand is of the values that are there.
        """
        step = self._session.step
        if step is not None and step.handed_out:
            raise PreconditionError("synchronize_parameters within a step: call it after optimizer.step()")
        model: Worker = self._model
        model.pull()

    def synchronize_optimizer_state(self) -> None:
        """Nothing to do: there is one state, on the servers."""
