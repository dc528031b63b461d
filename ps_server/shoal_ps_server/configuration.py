"""Configuration of a job on this server: its optimizer, its consistency model, and the current
values of its hyperparameter schedule. The module contains only data types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shoal_common.errors import PreconditionError

from shoal_ps_server.consistency.clocks import Consistency
from shoal_ps_server.shard.optimizer import OptimizerSettings, ParameterGroup


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Optimizer and consistency model of one job. Immutable."""

    configured: OptimizerSettings
    """Settings from the first ConfigureOptimizer. Later callers must request the same settings."""
    optimizer: OptimizerSettings
    """Current settings, including changes made by the schedule."""
    consistency: Consistency
    revision: int = 0
    """Revision of the last SetHyperparameters that was applied."""

    def check_equal(self, optimizer: OptimizerSettings, consistency: Consistency) -> None:
        """Raises PreconditionError / OPTIMIZER_CONFLICT if a later ConfigureOptimizer requests a
        different configuration."""
        for what, have, want in (
            ("optimizer", self.configured, optimizer),
            ("consistency", self.consistency, consistency),
        ):
            if have != want:
                raise PreconditionError(
                    f"this job's {what} was configured as {have}, but this request has {want}; "
                    "use SetHyperparameters to change a running optimizer, or use another job",
                    reason="OPTIMIZER_CONFLICT",
                )

    def revised(
        self, revision: int, hyperparameters: Mapping[str, float], groups: Iterable[ParameterGroup]
    ) -> Configuration:
        """Returns the configuration after a SetHyperparameters request, or this configuration if
        `revision` is not above the last revision. Raises the errors of
        `OptimizerSettings.changed`."""
        changed = self.optimizer.changed(hyperparameters, groups)
        return (
            self
            if revision <= self.revision
            else replace(self, optimizer=changed, revision=revision)
        )
