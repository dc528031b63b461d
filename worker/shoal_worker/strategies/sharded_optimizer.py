"""The optimizer of strategies whose state is cut over the ranks: it steps on the pieces that this rank holds (`sharded.py`)."""

from __future__ import annotations

from typing import Any

from shoal_worker.strategies.elastic_optimizer import ElasticOptimizer


class ShardedParametersOptimizer(ElasticOptimizer):
    """The user's optimizer, stepped on the pieces that this rank holds."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's optimizer's own, over the pieces that this rank holds. Looking at them ends the reduction of a plain step."""
        self._model.show_to_scaler()
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, as torch's `zero_grad` does; see `ModelInParts.zero_grad`."""
        self._model.zero_grad(set_to_none)

    def _apply(self) -> None:
        self._model.update(super()._apply)

    def _update(self, *, usable: bool) -> None:
        if usable:
            self.optimizer.step()
        else:
            self._model.skip()

    def _scale_gradients(self, scale: float) -> None:
        self._model.scale_gradients(scale)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that one process would have, whole: it loads under any strategy. Every rank calls it."""
        return self._model.optimizer_state_dict()  # type: ignore[no-any-return]

    def _load(self, state: dict[str, Any]) -> None:
        self._model.load_optimizer_state_dict(state)

    def synchronize_parameters(self) -> None:
        """Parameters agree on all ranks after every step: nothing to do."""

    def synchronize_optimizer_state(self) -> None:
        """Each rank's state is its own, and its buddy's: nothing to do."""
