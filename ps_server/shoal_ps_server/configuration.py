"""What a job has configured on this server: its optimizer, its consistency, and how far its
schedule has come. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shoal_common.errors import PreconditionError

from shoal_ps_server.consistency.clocks import Consistency
from shoal_ps_server.shard.optimizer import OptimizerSettings, ParameterGroup


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One job's settings. Changes make a new one."""

    configured: OptimizerSettings
    """What ConfigureOptimizer gave: later callers must agree with it."""
    optimizer: OptimizerSettings
    """What the schedule has made of it."""
    consistency: Consistency
    revision: int = 0
    """Revision of the last SetHyperparameters that was applied."""

    def check_equal(self, optimizer: OptimizerSettings, consistency: Consistency) -> None:
        """Raises PreconditionError / OPTIMIZER_CONFLICT unless a later ConfigureOptimizer asks for
        the same."""
        for what, have, want in (
            ("optimizer", self.configured, optimizer),
            ("consistency", self.consistency, consistency),
        ):
            if have != want:
                raise PreconditionError(
                    f"this job's {what} was configured as {have}, this request says {want}; use "
                    "SetHyperparameters to change a running optimizer, or another job",
                    reason="OPTIMIZER_CONFLICT",
                )

    def revised(
        self, revision: int, hyperparameters: Mapping[str, float], groups: Iterable[ParameterGroup]
    ) -> Configuration:
        """After SetHyperparameters; itself when `revision` is not above the last one. Raises as
        `OptimizerSettings.changed`."""
        changed = self.optimizer.changed(hyperparameters, groups)
        return (
            self
            if revision <= self.revision
            else replace(self, optimizer=changed, revision=revision)
        )
