"""Every variation of the training loop with every strategy (variations.py), on in-memory ranks, against one process.

`make test` runs each variation with some strategies; `make parity` runs all.
"""

from __future__ import annotations

import itertools
import re

import pytest
import shoal
from shoal_common.errors import ConfigurationError

from tests.parity.cells import REFUSED_VARIATIONS, STRATEGIES, WORLDS
from tests.parity.comparing import check_close
from tests.parity.training import Training, alone, apart, train
from tests.parity.variations import VARIATIONS


def _parameters() -> list[object]:
    parameters = []
    for (row, strategy), (column, name) in itertools.product(enumerate(STRATEGIES), enumerate(VARIATIONS)):
        world = WORLDS[(row + column) % len(WORLDS)]
        here = (row - column) % len(STRATEGIES) in (0, 3) and name != "compiled"
        parameters.append(pytest.param(strategy, name, world, marks=() if here else pytest.mark.matrix))
    return parameters


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch.compile's, of zero3's views
@pytest.mark.parametrize(("strategy", "variation", "world"), _parameters())
def test_ranks_train_as_one_process_does_or_are_refused(strategy: str, variation: str, world: int) -> None:
    what = Training(variation=VARIATIONS[variation], strategy=strategy, options=dict(STRATEGIES[strategy]))
    refusal = REFUSED_VARIATIONS.get((strategy, variation))
    if refusal is not None:
        with pytest.raises(ConfigurationError, match=re.escape(refusal)):
            shoal.launch(lambda: train(what), world_size=world)
        return
    outcomes = shoal.launch(lambda: train(what), world_size=world)
    if strategy == "local_sgd":
        expected = apart(what.variation, [outcome.seen for outcome in outcomes], **STRATEGIES[strategy])
    else:
        expected = alone(what.variation)
    for outcome in outcomes:
        check_close(expected, outcome.state, what.variation.tolerance)
