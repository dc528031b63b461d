"""Which checkpoints a fit under Lightning's Trainer saves, and whether it goes on from one. They
are Shoal's; the elastic loop saves them, where a step or an epoch is over with all that belongs to
it."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.callbacks import Checkpoint
from shoal_common.errors import ConfigurationError
from shoal_worker import api
from shoal_worker.elastic.worker_process import current_session


class Checkpoints(Checkpoint):
    """Takes the place of Lightning's `ModelCheckpoint` among a Trainer's callbacks: saves Shoal's
    checkpoints.

    A checkpoint is `directory/step-<n>`: model, optimizer, schedule, the Trainer's counts and its
    callbacks' states. It loads under any strategy on any number of ranks.
    `shoal.load_full_state(directory)` gives the model's state of the newest.
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
        """Saves, if it is due: a step of the run is over, with its evaluation, and with its epoch
        where it is the last of one."""
        if self.every_n_steps is not None:
            api.save_checkpoint(self.directory, keep=self.keep, every_steps=self.every_n_steps)

    def epoch_is_over(self) -> None:
        """Saves, if epochs are what it goes by."""
        if self.every_n_steps is None:
            self.save()

    def save(self) -> None:
        """Saves now: workers that are all asked to leave do."""
        if not current_session().is_redoing:
            api.save_checkpoint(self.directory, keep=self.keep)
