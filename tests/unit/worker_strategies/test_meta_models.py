"""ddp with a model on the meta device: which values it receives from a peer or from a
checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_worker.elastic.session.worker_process import set_session
from shoal_worker.engine.state.parameters import materialize
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh_session")


class Rotary(nn.Module):
    """A model with a parameter, a statistic, and a table that is registered twice and is not in the
    state_dict."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", scale * torch.arange(3.0), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("table", self.table, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.table


def on_meta() -> Rotary:
    with torch.device("meta"):
        return Rotary()


def distributed(net: nn.Module) -> tuple[shoal.ShardedModel, torch.optim.Optimizer]:
    set_session(None)
    return shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))


def trained(net: nn.Module) -> dict[str, Any]:
    """Trains one step and returns the captured state."""
    model, optimizer = distributed(net)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model.engine.capture()


def same(one: Rotary, other: Rotary) -> bool:
    named = [dict((*net.named_parameters(), *net.named_buffers())) for net in (one, other)]
    return all(torch.equal(tensor, named[1][name]) for name, tensor in named[0].items())


def test_a_meta_model_gets_its_unsaved_buffers_from_a_peer() -> None:
    peers = Rotary(scale=2.0)
    state = trained(peers)
    net = on_meta()
    model, _ = distributed(net)
    assert not model.engine.has_values()
    model.engine.restore(state)
    assert model.engine.has_values()
    assert same(peers, net)
    assert net.again.table is net.table


def test_a_meta_model_gets_its_unsaved_buffers_from_a_checkpoint(tmp_path: Path) -> None:
    peers = Rotary(scale=2.0)
    trained(peers)
    shoal.save_checkpoint(tmp_path)
    shoal.shutdown()
    net = on_meta()
    model, optimizer = distributed(net)
    assert shoal.resume(tmp_path)
    assert same(peers, net)
    model(torch.randn(4, 3)).sum().backward()
    assert optimizer.step()


def test_peers_unsaved_buffers_replace_own_values() -> None:
    peers, net = Rotary(scale=2.0), on_meta()
    state = trained(peers)
    net.table = net.again.table = torch.full((3,), 5.0)
    model, _ = distributed(net)
    model.engine.restore(state)
    assert same(peers, net)


def test_buffer_without_any_value_is_one_clear_error_and_changes_nothing() -> None:
    net = on_meta()
    with pytest.raises(shoal.ConfigurationError, match=r"buffer 'table' is on the meta device"):
        materialize(net, None, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in net.parameters())
