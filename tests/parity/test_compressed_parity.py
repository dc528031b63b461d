"""Every compressor with every strategy on in-memory ranks: it trains within its bounds (cells.py)
and equally on all ranks, or is refused.

The bounds of single sums and the effect of error feedback are tested in tests/unit/compression.
`make test` runs a few of the cases.
"""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import shoal
import torch
import torch.nn.functional as F
from shoal_common.errors import ConfigurationError
from shoal_worker.compression.registry import compressor_names

from tests.parity.cells import COMPRESSORS, ROWS, Cell, refused_compression
from tests.parity.models import SAMPLES, make_data, make_model
from tests.parity.training import State, Training, alone, train
from tests.parity.variations import Variation

_HOW = Variation(
    optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.5),
    clips=False,
    epochs=10,
    tolerance=1e-5,
)


def _loss(state: State) -> float:
    net = make_model(_HOW.model, _HOW.dtype)
    net.load_state_dict(dict(state), strict=False)
    x, y = make_data(_HOW.model, _HOW.dtype)[:SAMPLES]
    return F.cross_entropy(net(x), y).item()


def _start() -> State:
    return {name: p.detach() for name, p in make_model(_HOW.model, _HOW.dtype).named_parameters()}


@functools.cache
def _alone() -> State:
    return alone(_HOW)


def _vector(state: State) -> torch.Tensor:
    return torch.cat([state[name].flatten() for name in _start()])


def _parameters() -> list[object]:
    parameters = []
    for (index, row), (column, name) in itertools.product(enumerate(ROWS), enumerate(COMPRESSORS)):
        worlds = ROWS[row].worlds
        here = (row, name) in (
            ("ddp", "powersgd"),
            ("zero2", "int8"),
            ("fsdp", "topk"),
            ("zero3", "powersgd"),
            ("hsdp", "bf16"),
        )
        marks = () if here else pytest.mark.matrix
        parameters.append(
            pytest.param(row, name, worlds[(index + column) % len(worlds)], marks=marks)
        )
    return parameters


@pytest.mark.parametrize(("row", "compressor", "world"), _parameters())
def test_ranks_train_within_the_compressors_bounds_or_are_refused(
    row: str, compressor: str, world: int
) -> None:
    cell = Cell(row=row, backend="inmemory", model=_HOW.model, optimizer="", world=world, check="")
    asked = COMPRESSORS[compressor]
    options = {**cell.options, "gradient_compression": {"name": compressor, **asked.settings}}
    what = Training(variation=_HOW, strategy=cell.strategy, options=options)
    refusal = refused_compression(row, compressor)
    if refusal is not None:
        with pytest.raises(ConfigurationError, match=re.escape(refusal)):
            shoal.launch(lambda: train(what), world_size=world)
        return
    states = [outcome.state for outcome in shoal.launch(lambda: train(what), world_size=world)]
    assert all(torch.equal(_vector(state), _vector(states[0])) for state in states)
    if asked.deviation is not None:
        off = (_vector(states[0]) - _vector(_alone())).norm() / (
            _vector(_alone()) - _vector(_start())
        ).norm()
        assert off <= asked.deviation
    if asked.learned is not None:
        assert (_loss(_start()) - _loss(states[0])) / (
            _loss(_start()) - _loss(_alone())
        ) >= asked.learned


def test_no_compressor_is_left_out() -> None:
    assert set(COMPRESSORS) == set(compressor_names())
