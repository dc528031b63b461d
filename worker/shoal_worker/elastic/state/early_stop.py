"""Early stopping as part of the run's state: records that the script left a loop over epochs
because `should_early_stop` returned True.

A checkpoint records it, so that a resumed run does not train another epoch. A session records it
only if every call of `should_early_stop` since the last step returned True: if one of two metrics
still improves, the script left the loop for another reason."""

from __future__ import annotations


class EarlyStop:
    """The loop that early stopping has ended, if any. Used by the training thread."""

    def __init__(self) -> None:
        self._step = -1
        """Step after which `should_early_stop` was last called."""
        self._agrees = False
        """True if all calls after that step returned True."""
        self._left = ""
        """Name of the loader whose `epochs()` was left after that; empty if none was."""
        self._resumed = ""
        """Name of the loader whose `epochs()` early stopping had ended before the resume, until the
        script enters that loop again."""

    def answered(self, stop: bool, *, step: int) -> None:
        """Records a result of `should_early_stop`. `step`: number of committed steps."""
        self._agrees = stop and (self._agrees or self._step != step)
        self._step, self._left = step, ""

    def left(self, loader: str, *, step: int) -> None:
        """Records that the script left the `epochs()` of `loader` with `break`."""
        if self._agrees and self._step == step:
            self._left = loader

    def ended(self, *, step: int) -> str:
        """Returns the loader whose `epochs()` ended early after `step` steps; empty if none did."""
        return self._left if self._step == step else ""

    def resumed(self, loader: str) -> None:
        """Records the loader named by the checkpoint that was loaded; empty if it names none."""
        self._resumed = loader

    def passes(self, loader: str) -> bool:
        """Returns whether the script must skip the `epochs()` of `loader` that it is about to
        enter, because early stopping had ended it before the resume. Later loops over epochs are
        not skipped."""
        if not loader or self._resumed != loader:
            return False
        self._resumed = ""
        return True
