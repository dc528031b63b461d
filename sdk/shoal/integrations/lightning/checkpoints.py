"""Configures the checkpoints of a fit under Lightning's Trainer, and whether it resumes from one.
They are Shoal's checkpoints, saved by the elastic loop when a step or an epoch is complete."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.callbacks import Checkpoint
from shoal_common.errors import ConfigurationError
from shoal_worker import api
from shoal_worker.elastic.session.worker_process import current_session


class Checkpoints(Checkpoint):
    """Replaces Lightning's `ModelCheckpoint` among a Trainer's callbacks: saves Shoal's
    checkpoints.

    A checkpoint is `directory/step-<n>`: model, optimizer, schedule, the Trainer's counts and its
    callbacks' states. It loads under any strategy on any number of ranks.
    `shoal.load_full_state(directory)` returns the model's state of the newest one.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every_n_steps: int | None = None,
        keep: int = 3,
        resume: bool = False,
    ) -> None:
        """
        Args:
            directory: shared by all ranks, or local to the first rank's machine.
            every_n_steps: saves behind steps whose number in the run is a multiple of this; None:
                behind each epoch.
            keep: how many checkpoints to keep; at least 1.
            resume: `fit` goes on from the newest one in `directory`, if there is one, and else
                begins.

        Raises:
            ConfigurationError: `every_n_steps` or `keep` is no whole number of at least 1.
        """
        super().__init__()
        for name, value in {"every_n_steps": every_n_steps, "keep": keep}.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(
                    f"Checkpoints({name}={value!r}): expected a whole number of at least 1"
                )
        self.directory = Path(directory)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.resume = resume

    def step_is_over(self) -> None:
        """Saves if a checkpoint is due after a complete step, including its evaluation and the end
        of an epoch that it completes."""
        if self.every_n_steps is not None:
            api.save_checkpoint(self.directory, keep=self.keep, every_steps=self.every_n_steps)

    def epoch_is_over(self) -> None:
        """Saves if checkpoints are per epoch."""
        if self.every_n_steps is None:
            self.save()

    def save(self) -> None:
        """Saves now: workers that are all asked to leave do."""
        if not current_session().is_redoing:
            api.save_checkpoint(self.directory, keep=self.keep)
