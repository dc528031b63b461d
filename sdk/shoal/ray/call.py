"""Transfers a function to the ranks, and its results or exceptions back, in files in a launcher's
directory.

The function and its results are pickled with Ray's cloudpickle, as Ray does with all functions.
This does not add a risk: anyone who may submit work to a Ray cluster can run code there
(docs/explanation/launcher-and-deployment.md#batch-systems). The actors in between only pass on the
bytes. Only the worker that calls the function unpickles it, and only the driver unpickles its
result; no other process needs Ray for this.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shoal_common.errors import ConfigurationError

from shoal.ray.command import PATH, Ended

CALL: Final = "call"
"""Name of the file with the function and its arguments."""
_VALUE: Final = "value-{}.left"
_FAILURE: Final = "failure-{}.left"


@dataclass(frozen=True)
class Value:
    """Return value of the call on one rank."""

    rank: int
    world_size: int
    """World size of this rank's generation when the function returned."""
    value: Any


@dataclass(frozen=True)
class Failure:
    """Exception of the call on one rank."""

    at: float
    """Time of the exception in seconds since the Unix epoch, by the clock of the rank's machine."""
    rank: int
    error: BaseException
    """The exception or, if it cannot be pickled, a RuntimeError with its text."""
    trace: str


def packed(function: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Pickles the function and its arguments. Raises ConfigurationError if they cannot be
    pickled."""
    from ray import cloudpickle

    try:
        call: bytes = cloudpickle.dumps((function, tuple(arguments)))
    except Exception as error:
        raise ConfigurationError(
            f"shoal.ray.run({_named(function)}): cannot pickle the function or its arguments: "
            f"{error}; create the objects that it needs (models, datasets, open files) inside "
            "the function"
        ) from error
    return call


def call_here(directory: Path, index: int, *, rank_and_size: Callable[[], tuple[int, int]]) -> None:
    """Calls the function stored in `directory`, and stores its return value or exception there.

    Args:
        directory: directory shared with the actor.
        index: local rank of this worker.
        rank_and_size: returns the rank of this worker and the world size; called after the function
            has returned or raised.

    Raises:
        ConfigurationError: the return value cannot be pickled.
        BaseException: the exception raised by the function.
    """
    sys.path += [
        entry for entry in json.loads((directory / PATH).read_text()) if entry not in sys.path
    ]
    # trusted: written by the actor into a directory of this user
    function, arguments = pickle.loads((directory / CALL).read_bytes())  # noqa: S301
    try:
        value = function(*arguments)
        content = _pickled_value(Value(*rank_and_size(), value), function)
    except Exception as error:
        failure = Failure(
            getattr(error, "failed_at", None) or time.time(),
            rank_and_size()[0],
            error,
            traceback.format_exc(),
        )
        _leave(directory / _FAILURE.format(index), _pickled_failure(failure))
        raise
    _leave(directory / _VALUE.format(index), content)


def values_in(ended: Iterable[Ended]) -> list[Value]:
    """Returns the return values of all ranks, ordered by rank."""
    return sorted(_read(ended, _VALUE), key=lambda value: value.rank)


def first_failure_in(ended: Iterable[Ended]) -> Failure | None:
    """Returns the earliest failure, which probably caused the others; None if there are no
    failures."""
    return min(_read(ended, _FAILURE), key=lambda failure: failure.at, default=None)


def _read(ended: Iterable[Ended], name: str) -> list[Any]:
    prefix = name.partition("{")[0]
    found = [
        content
        for end in ended
        for file, content in sorted(end.files.items())
        if file.startswith(prefix)
    ]
    # trusted: sent by this run's own workers over Ray
    return [pickle.loads(content) for content in found]  # noqa: S301


def _pickled_value(value: Value, function: Callable[..., Any]) -> bytes:
    from ray import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise ConfigurationError(
            f"cannot pickle the return value of {_named(function)} ({type(value.value).__name__}): "
            f"{error}; return numbers, tensors or state dicts"
        ) from error
    return content


def _pickled_failure(failure: Failure) -> bytes:
    from ray import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(failure)
        # some exceptions cannot be unpickled
        pickle.loads(content)  # noqa: S301
    except Exception:
        error = RuntimeError(f"{type(failure.error).__name__}: {failure.error}")
        content = cloudpickle.dumps(Failure(failure.at, failure.rank, error, failure.trace))
    return content


def _leave(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(content)
    part.replace(path)


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
