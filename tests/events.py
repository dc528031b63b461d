"""TensorBoard's event files, read as TensorBoard reads a directory of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    """Returns the steps and values of a scalar in the order of the files."""
    read = _read(directory)
    return (
        [(event.step, event.value) for event in read.Scalars(tag)]
        if tag in read.Tags()["scalars"]
        else []
    )


def texts(directory: Path) -> list[tuple[int, str]]:
    """Returns the steps and texts of the events."""
    read, tag = _read(directory), "shoal/events/text_summary"
    found = read.Tensors(tag) if tag in read.Tags()["tensors"] else []
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def _read(directory: Path) -> EventAccumulator:
    # imported here because it takes a second, and each process of pytest imports this module
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    read = EventAccumulator(str(directory), size_guidance={"scalars": 0, TENSORS: 0})
    read.Reload()
    return read
