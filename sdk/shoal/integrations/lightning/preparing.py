"""Calls `prepare_data` of modules and data modules once per machine, before any worker on the
machine continues.

Lightning calls it in the first process while the other processes wait in a collective. For
Lightning, however, each of Shoal's workers is a job with a single process. The workers of a machine
therefore use a file lock to wait for the first worker (`first_of_machine.py`). A replacement worker
finds the data already prepared.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from shoal_worker.elastic.session.first_of_machine import main_first
from shoal_worker.settings import WorkerSettings

_TIMEOUT: Final = timedelta(hours=6)
"""Maximum wait of the other workers. Lightning waits without limit."""


def preparers(trainer: pl.Trainer) -> Iterator[Any]:
    """Yields the data module and the module, if they override `prepare_data`."""
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None and is_overridden("prepare_data", datamodule, pl.LightningDataModule):
        yield datamodule
    if is_overridden("prepare_data", trainer.lightning_module):
        yield trainer.lightning_module


def prepare_data(trainer: pl.Trainer) -> None:
    """Calls `prepare_data` in place of the Trainer. If a call raises an error or its process dies,
    another worker on the machine retries the call.

    Raises:
        DeadlineError: the first worker on this machine took longer than 6 hours.
    """
    for number, owner in enumerate(preparers(trainer)):
        worker = WorkerSettings()
        started = f"{worker.job_id} {worker.launcher_id} {trainer.state.fn} {number}"
        scope = f"prepare_data {started} {Path.cwd()} {type(owner).__qualname__}"
        # Without a launcher, a replacement worker cannot be distinguished from a worker of a new
        # run.
        with main_first(scope, timeout=_TIMEOUT, once=bool(worker.launcher_id)) as is_first:
            if is_first:
                owner.prepare_data()
