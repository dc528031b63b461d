"""Program that calls a function in a worker of a launcher on Ray: `python -m shoal.ray.worker`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.ray.call import call_here
from shoal.ray.command import DIRECTORY


def _rank_and_size() -> tuple[int, int]:
    """Returns the rank and the world size, from the session if the function has created one,
    otherwise from torchrun's variables."""
    if "shoal_worker.elastic.session.worker_process" in sys.modules:
        from shoal_worker.elastic.session.worker_process import find_session

        if (session := find_session()) is not None:
            return session.rank, session.world_size
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    call_here(
        Path(os.environ[DIRECTORY]), int(os.environ["LOCAL_RANK"]), rank_and_size=_rank_and_size
    )
