"""Every cell of the matrix (cells.py) is trained on its ranks and compared with one process, or
refused with its error.

`make test` runs a subset that has every row and every column; `make parity` runs all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.backends.registry import backend_names
from shoal_worker.strategies import registry

from tests.parity import models
from tests.parity.cells import ASYNC, BACKENDS, MODELS, ROWS, SERVERS, Cell, cells, part
from tests.parity.comparing import check_close
from tests.parity.ranks import Places, training
from tests.parity.training import Outcome, State, alone_plainly, apart, plain, train
from tests.parity.variations import OPTIMIZERS


@pytest.fixture
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    return Places(
        # requested only for cells that need them
        processes=lambda count: request.getfixturevalue("take_ranks")(count),  # noqa: PLW0108
        # so, too
        mpi_world=lambda size: request.getfixturevalue("mpi_ranks")(size),  # noqa: PLW0108
        directory=tmp_path,
    )


def _parameters() -> list[object]:
    chosen = part()
    # the others are in tests/integration/worker_async/test_async_parity.py
    here = [cell for cell in cells() if cell.backend != SERVERS]
    return [
        pytest.param(cell, id=str(cell), marks=() if cell in chosen else pytest.mark.matrix)
        for cell in here
    ]


@functools.cache
def one_rank(model: str, optimizer: str) -> State:
    """Returns the parameters and buffers of a world of one, in float32."""
    cell = Cell(
        row="ddp", backend="inmemory", model=model, optimizer=optimizer, world=1, check="bitwise"
    )
    return shoal.launch(lambda: train(training(cell)), world_size=1)[0].state


@pytest.mark.parametrize("cell", _parameters())
def test_ranks_train_as_one_process_does_or_are_refused(cell: Cell, places: Places) -> None:
    if cell.refusal is not None:
        with pytest.raises(ConfigurationError, match=re.escape(cell.refusal)):
            places.run(cell)
        return
    outcomes = places.run(cell)
    if cell.check == "bitwise":
        _check_bitwise(one_rank(cell.model, cell.optimizer), outcomes)
    else:
        how = plain(cell.model, cell.optimizer, cell.check)
        expected = _expected(cell, outcomes)
        for outcome in outcomes:
            check_close(expected, outcome.state, how.tolerance)


def _expected(cell: Cell, outcomes: list[Outcome]) -> State:
    how = plain(cell.model, cell.optimizer, cell.check)
    if cell.strategy == "local_sgd":
        return apart(how, [outcome.seen for outcome in outcomes], **cell.options)
    return alone_plainly(cell.model, cell.optimizer, cell.check, grouped=how.micro)


def _check_bitwise(expected: State, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.state.keys() == expected.keys()
        assert [
            name for name in expected if not torch.equal(outcome.state[name], expected[name])
        ] == []


@pytest.mark.parametrize(
    ("have", "should"),
    [
        (lambda: {ASYNC, *(row.strategy for row in ROWS.values())}, lambda: set(registry.names())),
        (lambda: {*BACKENDS, "nccl"}, lambda: set(backend_names())),
        (lambda: set(MODELS), lambda: set(models.MODELS)),
        (lambda: set(OPTIMIZERS), lambda: {cell.optimizer for cell in part()}),
    ],
    ids=["strategies", "backends", "models", "optimizers"],
)
def test_matrix_contains_every_registered_value(
    have: Callable[[], set[str]], should: Callable[[], set[str]]
) -> None:
    assert have() == should()


def test_make_test_runs_every_row_and_every_column() -> None:
    chosen = part()
    for axis in ("row", "backend", "model", "optimizer", "world", "check"):
        assert {getattr(cell, axis) for cell in chosen} == {
            getattr(cell, axis) for cell in cells()
        }, axis
    assert {cell.row for cell in chosen if cell.backend == "inmemory"} == {
        cell.row for cell in chosen if cell.backend in BACKENDS[1:]
    }
