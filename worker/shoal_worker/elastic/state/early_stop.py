"""Early stopping as a fact of the run: a loop over epochs that the script left because
`should_early_stop` said so.

A checkpoint records it, so that a resumed run does not train another epoch. A session records it
only if every call of `should_early_stop` since the last step returned True: if one of two metrics
still improves, the script left the loop for another reason.
"""

from __future__ import annotations


class EarlyStop:
    """The loop that early stopping has ended, if any. Used by the training thread."""

    def __init__(self) -> None:
        self._step = -1
        """Step after which `should_early_stop` was last called."""
        self._agrees = False
        """True if all calls after that step returned True."""
        self._left = ""
        """Loader whose `epochs()` was left then; empty if none was."""
        self._resumed = ""
        """Loader whose `epochs()` ended in this way before the resume, until the script enters that
        loop."""

    def answered(self, stop: bool, *, step: int) -> None:
        """Records an answer of `should_early_stop`. `step`: number of committed steps."""
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
        """Returns whether the script enters the `epochs()` of `loader` that ended before the
        resume. The next loop over epochs trains."""
        if not loader or self._resumed != loader:
            return False
        self._resumed = ""
        return True
