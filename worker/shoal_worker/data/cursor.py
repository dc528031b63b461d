"""Where a training loader stands. Pure; one method per move.

The cursor counts samples, not steps, so that a run can go on with another global batch size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal_common.errors import CorruptDataError

from shoal_worker.data.plan import EpochPlan


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """The place after the last committed step."""

    epoch: int = 0
    """0-based. After an epoch's last step: the next one."""
    samples: int = 0
    """Positions of the epoch that are done."""
    step: int = 0
    """Steps of the epoch that are done."""
    global_step: int = 0
    """Steps committed in all epochs."""

    def after_step(self, step: range, plan: EpochPlan) -> Cursor:
        """`step`, the one at this cursor, is committed."""
        moved = Cursor(epoch=self.epoch, samples=step.stop, step=self.step + 1, global_step=self.global_step + 1)
        return moved if plan.step(moved.samples) else moved.at_epoch(self.epoch + 1)

    def after_leased_batch(self) -> Cursor:
        """A leased batch is committed; which ones of the epoch are done is not for one member to know."""
        return replace(self, global_step=self.global_step + 1)

    def at_epoch(self, epoch: int) -> Cursor:
        """At the head of `epoch`."""
        return replace(self, epoch=epoch, samples=0, step=0)

    def to_state(self) -> dict[str, Any]:
        """Returns the cursor as what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cursor:
        """The inverse; other keys are ignored.

        Raises:
            CorruptDataError: a field is missing or no count.
        """
        values = {name: state.get(name) for name in ("epoch", "samples", "step", "global_step")}
        for name, value in values.items():
            if type(value) is not int or value < 0:
                raise CorruptDataError(f"the loader's state has {name}={value!r}; expected a whole number of at least 0")
        return cls(**values)  # type: ignore[arg-type]  # checked above
