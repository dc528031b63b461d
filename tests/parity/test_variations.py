"""Every variation of the training loop (variations.py) with every strategy on in-memory ranks,
compared with one process.

`make test` runs each variation with some strategies; `make parity` runs all.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import shoal
from shoal_common.errors import ConfigurationError

from tests.parity.cells import REFUSED_VARIATIONS, ROWS, Cell
from tests.parity.comparing import check_close
from tests.parity.training import Training, alone, apart, train
from tests.parity.variations import VARIATIONS


def _parameters() -> list[object]:
    parameters = []
    for (index, row), (column, name) in itertools.product(enumerate(ROWS), enumerate(VARIATIONS)):
        worlds = ROWS[row].worlds
        here = index == column % len(ROWS) and name != "compiled" and not ROWS[row].divided
        # strategies that hide the parameters' gradients
        here = here or (name == "unused" and row in ("tensor", "pipeline", "hybrid"))
        marks = () if here else pytest.mark.matrix
        world = worlds[-1] if row == "hybrid" else worlds[(index + column) % len(worlds)]
        if name == "sparse" and row == "pipeline":
            world = 2  # the pipeline's model has two blocks
        parameters.append(pytest.param(row, name, world, marks=marks))
    return parameters


# raised by torch.compile for zero3's views
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("row", "variation", "world"), _parameters())
def test_ranks_train_as_one_process_does_or_are_refused(
    row: str, variation: str, world: int
) -> None:
    cell = Cell(
        row=row,
        backend="inmemory",
        model=VARIATIONS[variation].model,
        optimizer="",
        world=world,
        check="",
    )
    how = VARIATIONS[variation]
    options = cell.options
    if how.draws and ROWS[row].divided and not ROWS[row].pipelined:
        options["dropout"] = "as_one_process"
    if ROWS[row].pipelined:
        how = replace(how, train_step=True)
        if how.micro:
            options["micro_batches"] = 1
    what = Training(variation=how, strategy=cell.strategy, options=options)
    refusal = REFUSED_VARIATIONS.get((row, variation))
    if refusal is not None:
        with pytest.raises(ConfigurationError, match=re.escape(refusal)):
            shoal.launch(lambda: train(what), world_size=world)
        return
    outcomes = shoal.launch(lambda: train(what), world_size=world)
    if row == "local_sgd":
        expected, tolerance = (
            apart(how, [outcome.seen for outcome in outcomes], **options),
            how.tolerance,
        )
    elif ROWS[row].pipelined and how.draws:
        # stages draw their own random numbers, which are the same in each run and for all ranks
        expected, tolerance = shoal.launch(lambda: train(what), world_size=world)[0].state, 0.0
    else:
        expected = alone(how)
        tolerance = (how.divided_tolerance if ROWS[row].divided else None) or how.tolerance
    for outcome in outcomes:
        check_close(expected, outcome.state, tolerance)
