"""`prepare_data` of modules and data modules: once on each machine, before anybody there goes on.

Lightning calls it in the first process alone, and the others wait in a collective. Here each worker
is a process of its own to Lightning: they wait for the first one of their machine by a lock on a
file (`first_of_machine.py`), and a worker that replaces another finds it done.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from shoal_worker.elastic.first_of_machine import main_first
from shoal_worker.settings import WorkerSettings

_TIMEOUT: Final = timedelta(hours=6)
"""How long the others wait: Lightning's own are patient without end."""


def preparers(trainer: pl.Trainer) -> Iterator[Any]:
    """The data module and the module, those of them that prepare data."""
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None and is_overridden("prepare_data", datamodule, pl.LightningDataModule):
        yield datamodule
    if is_overridden("prepare_data", trainer.lightning_module):
        yield trainer.lightning_module


def prepare_data(trainer: pl.Trainer) -> None:
    """In the place of the Trainer's own. One that raises, or whose process dies, is followed by
    another worker's.

    Raises:
        DeadlineError: the first worker of this machine took longer than 6 hours.
    """
    for number, owner in enumerate(preparers(trainer)):
        worker = WorkerSettings()
        started = f"{worker.job_id} {worker.launcher_id} {trainer.state.fn} {number}"
        scope = f"prepare_data {started} {Path.cwd()} {type(owner).__qualname__}"
        # Without a launcher nothing tells a worker that replaces another from one of a run that
        # begins anew.
        with main_first(scope, timeout=_TIMEOUT, once=bool(worker.launcher_id)) as is_first:
            if is_first:
                owner.prepare_data()
