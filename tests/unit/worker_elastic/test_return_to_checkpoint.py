"""The checkpoints to which a running script can return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shoal_worker.elastic.state.committed_state import CommittedState


class Loader:
    """A loader that has only a cursor."""

    def __init__(self, name: str, epoch: int, step: int, *, under_way: bool) -> None:
        self.name, self.epoch, self.step, self.under_way = name, epoch, step, under_way

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "step": self.step}

    def cursor_reader(self) -> Callable[[], dict[str, Any]]:
        return dict


@pytest.mark.parametrize(
    ("train", "other", "then", "why_not"),
    [
        ((1, 5, True), (0, 0, False), {"train": (1, 2), "other": (0, 0)}, None),
        (
            (1, 5, True),
            (0, 0, False),
            {"train": (0, 9), "other": (0, 0)},
            "it is in epoch 1 of loader 'train'",
        ),
        (
            (1, 5, True),
            (2, 0, False),
            {"train": (1, 2), "other": (1, 0)},
            "loader 'other' has advanced",
        ),
        ((1, 5, True), (0, 0, False), {"other": (0, 0)}, "it is in epoch 1 of loader 'train'"),
        ((1, 5, False), (0, 0, False), {"train": (1, 5)}, "it is not in a loop"),
    ],
)
def test_script_can_repeat_only_the_steps_of_its_loop(
    train: tuple[int, int, bool],
    other: tuple[int, int, bool],
    then: dict[str, tuple[int, int]],
    why_not: str | None,
) -> None:
    held = CommittedState(live=True)
    loaders = [
        Loader(name, epoch, step, under_way=under)
        for name, (epoch, step, under) in (("train", train), ("other", other))
    ]
    for loader in loaders:
        held.add_source(loader)  # type: ignore[arg-type]  # has only the used parts
    sources = {name: {"epoch": epoch, "step": step} for name, (epoch, step) in then.items()}
    answer = held.cannot_return({"steps": 3, "sources": sources})
    assert answer is None if why_not is None else answer is not None and answer.startswith(why_not)
    # there is no step to repeat
    assert held.cannot_return({"steps": held.steps, "sources": sources}) is None
