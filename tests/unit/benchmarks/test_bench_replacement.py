"""The time at which a group of workers is at full strength again after a kill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from benchmarks.replacement import FullStrength
from benchmarks.workers.steplog import Commit


def commit(time_ns: int, group: int, world_size: int = 3) -> Commit:
    return Commit(time_ns=time_ns, group=group, world_size=world_size, rank=0, step=0)


def test_full_strength_is_a_step_of_all_including_a_new_process() -> None:
    logs: Any = SimpleNamespace(
        read=lambda: None, commits={1: [commit(5, 1)], 2: [commit(5, 1)], 3: [commit(5, 1)]}
    )
    strength = FullStrength(cast(Any, logs), before=(1, 2, 3), killed_ns=10)
    for pid in (1, 2):
        logs.commits[pid] += [commit(20, 2, world_size=2), commit(40, 3), commit(50, 3)]
    assert not strength.reached()
    logs.commits[9] = [commit(1_000_000_010, 3)]
    assert strength.reached()
    assert strength.pause_s == 1.0
