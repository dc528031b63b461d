"""`prepare_data` of modules and data modules: called once per machine, before any worker there
continues.

Lightning calls it in the first process while the others wait in a collective. Here each worker is a
separate process to Lightning, so workers wait for the first one of their machine through a file
lock (`first_of_machine.py`), and a replacement worker finds it done.
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
"""Time for which the others wait; Lightning's wait without limit."""


def preparers(trainer: pl.Trainer) -> Iterator[Any]:
    """Yields the data module and the module, if they prepare data."""
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None and is_overridden("prepare_data", datamodule, pl.LightningDataModule):
        yield datamodule
    if is_overridden("prepare_data", trainer.lightning_module):
        yield trainer.lightning_module


def prepare_data(trainer: pl.Trainer) -> None:
    """Replaces the Trainer's own. If a call raises or its process dies, another worker repeats it.

    Raises:
        DeadlineError: the first worker on this machine took longer than 6 hours.
    """
    for number, owner in enumerate(preparers(trainer)):
        worker = WorkerSettings()
        started = f"{worker.job_id} {worker.launcher_id} {trainer.state.fn} {number}"
        scope = f"prepare_data {started} {Path.cwd()} {type(owner).__qualname__}"
        # Without a launcher, a replacement worker cannot be distinguished from one of a new run.
        with main_first(scope, timeout=_TIMEOUT, once=bool(worker.launcher_id)) as is_first:
            if is_first:
                owner.prepare_data()
