"""Cells of the parity matrix (tests/parity) in which one worker trains on parameter servers,
compared with one process."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import shoal_worker.api as shoal
import torch.nn.functional as F
from shoal_common.errors import ConfigurationError

from tests.integration.worker_async.async_cluster import AsyncCluster
from tests.parity.cells import SERVERS, Cell, cells, part
from tests.parity.comparing import check_close
from tests.parity.models import make_data, make_model
from tests.parity.training import BATCH, MAX_NORM, State, alone_plainly, plain


def _parameters() -> list[object]:
    chosen = part()
    here = [cell for cell in cells() if cell.backend == SERVERS]
    return [
        pytest.param(cell, id=str(cell), marks=() if cell in chosen else pytest.mark.matrix)
        for cell in here
    ]


def _train(cell: Cell) -> State:
    how = plain(cell.model, cell.optimizer, cell.check)
    net, data = make_model(cell.model, how.dtype), make_data(cell.model, how.dtype)
    model, optimizer = shoal.as_distributed(
        net, how.optimizer(net), strategy=cell.strategy, **cell.options
    )
    loader = shoal.ElasticDataLoader(data, batch_size=BATCH, shuffle=False)
    for _ in loader.epochs(how.epochs):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            model.clip_grad_norm_(MAX_NORM)
            assert optimizer.step()
            optimizer.zero_grad()
    return model.full_state_dict()


@pytest.mark.parametrize("cell", _parameters())
def test_one_worker_trains_as_one_process_does_or_is_refused(
    cell: Cell, cluster: Callable[..., AsyncCluster]
) -> None:
    with cluster(keeps_data=False).member():
        if cell.refusal is not None:
            with pytest.raises(ConfigurationError, match=re.escape(cell.refusal)):
                _train(cell)
            return
        state = _train(cell)
    check_close(
        alone_plainly(cell.model, cell.optimizer, cell.check, grouped=False),
        state,
        plain(cell.model, cell.optimizer, cell.check).tolerance,
    )
