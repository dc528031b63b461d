"""What happens every k steps of the run: `every_steps=` of `save_checkpoint` and `evaluate`.

A count of the script's own cannot say when: it starts from nought in a process that joins. So it goes by the committed steps of the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal_common.errors import ConfigurationError, PreconditionError

from shoal_worker.elastic.contract import StepStatus

if TYPE_CHECKING:
    from shoal_worker.elastic.session import Session


def is_due(session: Session, every_steps: int, what: str) -> bool:
    """Whether `what` happens now: the last thing that the script did about steps was one that was committed, and its number in the run is a
    multiple of `every_steps`. So it is on all ranks alike, on one that joined as well, and not again when the step after it was lost.

    Raises:
        ConfigurationError: `every_steps` is no whole number of at least 1.
        PreconditionError: a batch was handed out, and its step is not finished.
    """
    if type(every_steps) is not int or every_steps < 1:
        raise ConfigurationError(f"{what}(every_steps={every_steps!r}): expected a whole number of at least 1")
    step = session.step
    if step is not None and step.source is not None and step.handed_out:
        if step.left:  # of a batch that was only looked at; a rank that joined here has finished no step before it
            return False
        raise PreconditionError(
            f"{what}(every_steps={every_steps}) was called inside a step: call it between optimizer.step() and the next batch, so that it "
            "goes by the step that was just finished",
            reason="STEP_NOT_FINISHED",
        )
    return session.outcome is StepStatus.COMMITTED and not session.is_redoing and session.steps % every_steps == 0
