"""Configures which checkpoints a fit under Lightning's Trainer saves, and whether it resumes from a
checkpoint. They are Shoal's checkpoints, which the elastic loop saves when a step or an epoch is
complete."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.callbacks import Checkpoint
from shoal_common.errors import ConfigurationError
from shoal_worker import api
from shoal_worker.elastic.session.worker_process import current_session


class Checkpoints(Checkpoint):
    """Saves Shoal's checkpoints. Pass it to the Trainer as a callback in place of Lightning's
    `ModelCheckpoint`.

    A checkpoint is a directory `directory/step-<n>` with the model, the optimizer, the
    learning-rate schedule, the Trainer's counts and the states of its callbacks. It can be loaded
    under any strategy on any number of ranks. `shoal.load_full_state(directory)` returns the
    model's state in the newest checkpoint.
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
            directory: directory shared by all ranks, or local to the first rank's machine; or a
                URL of an object store (docs/guides/object-storage.md).
            every_n_steps: saves after steps whose number in the run is a multiple of this; None:
                after each epoch.
            keep: number of checkpoints to keep, a positive integer.
            resume: True to continue `fit` from the newest checkpoint in `directory`, if there is
                one.

        Raises:
            ConfigurationError: `every_n_steps` or `keep` is not a positive integer.
        """
        super().__init__()
        for name, value in {"every_n_steps": every_n_steps, "keep": keep}.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(
                    f"Checkpoints({name}={value!r}): expected a positive integer"
                )
        self.directory = directory
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.resume = resume

    def step_is_over(self) -> None:
        """Saves a checkpoint if one is due after a step. Called after the step's validation; for
        the last step of an epoch, called after the end of the epoch."""
        if self.every_n_steps is not None:
            api.save_checkpoint(self.directory, keep=self.keep, every_steps=self.every_n_steps)

    def epoch_is_over(self) -> None:
        """Saves a checkpoint if checkpoints are saved once per epoch. Called at the end of an
        epoch."""
        if self.every_n_steps is None:
            self.save()

    def save(self) -> None:
        """Saves a checkpoint now. Also called when all workers are asked to leave."""
        if not current_session().is_redoing:
            api.save_checkpoint(self.directory, keep=self.keep)
