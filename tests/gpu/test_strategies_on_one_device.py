"""Every strategy with 2 and with 4 ranks that share one device over Gloo gives the same result as
plain torch on the host with the same samples.

The results agree in float64 to 1e-9, because only the order of sums differs. In a rehearsal, the
device is the host.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from shoal_worker.backends.gloo import on_devices

from tests.gpu import training
from tests.gpu.devices import is_there, on_host_and_device, rehearsal
from tests.gpu.ranks import together

_TOLERANCE = 1e-9
_LOSSY = 0.05
"""Tolerance for parameters under compressed gradients, relative to their total movement."""

_PIPELINE = {"schedule": "1f1b", "micro_batches": 4}
_STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {"shard_modules": [training.Block]}),
    "fsdp": ("fsdp", {"shard_modules": [training.Block]}),
    "hsdp": ("hsdp", {"shard_size": 2}),
    "tensor": ("tensor", {}),
    "pipeline": ("pipeline", _PIPELINE),
    "zero-bubble": ("pipeline", {**_PIPELINE, "schedule": "zero_bubble"}),
    "hybrid": ("hybrid", {"pipeline_parallel_size": 2, "micro_batches": 4}),
}
_CASES = [(name, ranks) for name in _STRATEGIES for ranks in (2, 4)]


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return training.alone()


@pytest.mark.parametrize(
    ("kind", "name", "ranks"), on_host_and_device(_CASES, quick=[("zero3", 2), ("pipeline", 2)])
)
def test_strategy_on_a_device_matches_one_process_on_the_host(
    kind: str, name: str, ranks: int, alone: dict[str, torch.Tensor]
) -> None:
    is_there(kind)
    strategy, options = _STRATEGIES[name]
    for trained in together(
        lambda: training.train(strategy, dict(options), backend="gloo"), world_size=ranks
    ):
        for parameter, value in alone.items():
            torch.testing.assert_close(trained[parameter], value, rtol=_TOLERANCE, atol=_TOLERANCE)


@rehearsal
def test_pipeline_with_messages_through_host_memory_matches_one_process(
    alone: dict[str, torch.Tensor],
) -> None:
    """A pipeline that copies messages through host memory trains as one process does. Tensors of
    the host are treated as tensors of a device."""
    with (
        mock.patch.object(on_devices, "is_elsewhere", return_value=True),
        mock.patch.object(on_devices, "host_copy", side_effect=on_devices.host_copy) as copied,
    ):
        outcomes = together(
            lambda: training.train("pipeline", dict(_PIPELINE), backend="gloo"), world_size=2
        )
    # an activation and its gradient per micro-batch
    assert copied.call_count >= 2 * 4 * training.STEPS
    for trained in outcomes:
        for parameter, value in alone.items():
            torch.testing.assert_close(trained[parameter], value, rtol=_TOLERANCE, atol=_TOLERANCE)


@pytest.mark.parametrize(("kind", "ranks"), on_host_and_device([(2,), (4,)], quick=[]))
def test_local_sgd_matches_the_average_of_models_trained_separately_on_the_host(
    kind: str, ranks: int
) -> None:
    is_there(kind)
    expected = training.alone(sync_every=2, ranks=ranks)
    for trained in together(
        lambda: training.train("local_sgd", {"sync_every": 2}, backend="gloo"), world_size=ranks
    ):
        for parameter, value in expected.items():
            torch.testing.assert_close(trained[parameter], value, rtol=_TOLERANCE, atol=_TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "how", "ranks"),
    on_host_and_device(
        [(how, ranks) for how in ("fp16", "powersgd") for ranks in (2, 4)], quick=[]
    ),
)
def test_compressed_gradients_end_close_to_uncompressed_ones(
    kind: str, how: str, ranks: int, alone: dict[str, torch.Tensor]
) -> None:
    is_there(kind)
    begun = {name: p.detach() for name, p in training.network().named_parameters()}
    outcomes = together(
        lambda: training.train("ddp", {"gradient_compression": how}, backend="gloo"),
        world_size=ranks,
    )
    assert len({training.digest(trained) for trained in outcomes}) == 1
    moved = sum(float((alone[name] - begun[name]).square().sum()) for name in alone) ** 0.5
    off = sum(float((outcomes[0][name] - alone[name]).square().sum()) for name in alone) ** 0.5
    assert off < moved if how == "powersgd" else off < _LOSSY * moved
