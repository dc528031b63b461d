"""The ranks of a cell: threads of a launch, or processes (tests/ranks) connected by Gloo or MPI.

A rank's task and result are the same everywhere. Processes receive the task in JSON and write the
result to files.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.backends.mpi.backend import own_seat
from shoal_worker.backends.worlds import Seat
from shoal_worker.elastic.session.worker_process import find_session, open_fixed, set_session
from torch.distributed import FileStore, PrefixStore

from tests.parity.cells import ROWS, Cell
from tests.parity.training import Outcome, Training, plain, train
from tests.ranks.processes import Rank

_TIMEOUT = timedelta(seconds=60)
_TASK = "tests.parity.ranks:be_rank"


def training(cell: Cell) -> Training:
    """Returns the training of a cell."""
    how = plain(cell.model, cell.optimizer, cell.check)
    if cell.row in ROWS and ROWS[cell.row].pipelined:
        how = replace(how, micro=False, train_step=True)
    return Training(variation=how, strategy=cell.strategy, options=cell.options)


@dataclass
class Places:
    """Sources of the ranks that train a cell."""

    processes: Callable[[int], list[Rank]]
    """Returns this many processes that are not in an MPI world."""
    mpi_world: Callable[[int], list[Rank]]
    directory: Path
    """An empty directory for the results of processes."""

    def run(self, cell: Cell) -> list[Outcome]:
        """Runs a cell and returns the outcomes by rank. Raises the ConfigurationError if all ranks
        raise one."""
        if cell.backend == "inmemory":
            return shoal.launch(lambda: train(training(cell)), world_size=cell.world)
        ranks = self.processes(cell.world) if cell.backend == "gloo" else self.mpi_world(cell.world)
        for number, rank in enumerate(ranks):
            rank.start(_TASK, cell=vars(cell), rank=number, directory=str(self.directory))
        refusals = {rank.result() for rank in ranks}
        assert len(refusals) == 1, f"expected all ranks to be refused or none: {refusals}"
        refused = refusals.pop()
        if refused is not None:
            raise ConfigurationError(refused)
        return [
            torch.load(self.directory / str(number), weights_only=False)
            for number in range(cell.world)
        ]


def be_rank(cell: Mapping[str, Any], rank: int, directory: str) -> str | None:
    """Runs one process. Returns the reason why it was refused, or None if it has written its
    outcome to `directory`."""
    what = Cell(**cell)
    store = FileStore(str(Path(directory) / "store"), what.world)
    if what.backend == "gloo":
        seat = Seat(
            rank=rank,
            world_size=what.world,
            store=PrefixStore("group", store),
            timeout=_TIMEOUT,
            backend="gloo",
        )
    else:
        seat = own_seat(_TIMEOUT)
    session = open_fixed(seat)
    try:
        torch.save(train(training(what)), Path(directory) / str(rank))
        refusal = None
    except ConfigurationError as error:
        refusal = "".join(traceback.format_exception_only(error))
    finally:
        # a rank that leaves would end the group for ranks still in their last collective
        _wait_for_all(store, what.world)
        if find_session() is session:
            session.close()
            set_session(None)
    return refusal


def _wait_for_all(store: FileStore, world: int) -> None:
    if store.add("done", 1) == world:
        store.set("all done", "")
    store.wait(["all done"], _TIMEOUT)
