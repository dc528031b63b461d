"""Early stopping as part of the run's state: records that the script has left a loop over epochs
because `should_early_stop` returned True.

Checkpoints contain this record, so that a resumed run does not train another epoch. It is made only
if every call to `should_early_stop` since the last step has returned True: if one of two metrics
still improves, the script has left the loop for a different reason."""

from __future__ import annotations


class EarlyStop:
    """Records which loop early stopping has ended, if any. Used by the training thread."""

    def __init__(self) -> None:
        self._step = -1
        """Step after which `should_early_stop` was last called."""
        self._agrees = False
        """True if all calls after step `_step` returned True."""
        self._left = ""
        """Name of the loader whose `epochs()` the script left after these calls; empty if there is
        none."""
        self._resumed = ""
        """Name of the loader whose `epochs()` early stopping ended before the resume, until the
        script enters that loop again."""

    def answered(self, stop: bool, *, step: int) -> None:
        """Records a result of `should_early_stop`. `step`: number of committed steps."""
        self._agrees = stop and (self._agrees or self._step != step)
        self._step, self._left = step, ""

    def left(self, loader: str, *, step: int) -> None:
        """Records that the script has left the `epochs()` of `loader` with `break`."""
        if self._agrees and self._step == step:
            self._left = loader

    def ended(self, *, step: int) -> str:
        """Returns the loader whose `epochs()` ended early after `step` steps; empty if none did."""
        return self._left if self._step == step else ""

    def resumed(self, loader: str) -> None:
        """Records that the loaded checkpoint names `loader` as the loader whose loop early stopping
        has ended; empty if it names none."""
        self._resumed = loader

    def passes(self, loader: str) -> bool:
        """Returns whether the script must skip the loop over `epochs()` of `loader` that it is
        about to enter, because early stopping ended this loop before the resume. Returns True only
        once, so later loops over epochs are not skipped."""
        if not loader or self._resumed != loader:
            return False
        self._resumed = ""
        return True
