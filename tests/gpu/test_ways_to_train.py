"""Common ways to train on a device: bf16 autocast, a GradScaler that meets an inf, a compiled
block, and data workers with pinned batches. Two ranks share the device, and the result is that of
plain torch on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.gpu import training
from tests.gpu.devices import is_there, lease_ms, on_host_and_device, sharing
from tests.gpu.ranks import together
from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

_INF_AT = 2 * training.BATCH + 3
"""A sample of the third step, in the share of one rank."""
_SCALE = 2.0**10


def data(*, with_inf: bool) -> TensorDataset:
    """Returns the samples in float32. With `with_inf`, one of them has an infinite loss."""
    x, y = (each.clone() for each in training.dataset(torch.float32).tensors)
    if with_inf:
        y[_INF_AT] = float("inf")
    return TensorDataset(x, y)


def take_steps(
    batches: Iterator[Any],
    model: Any,
    optimizer: Any,
    device: torch.device,
    *,
    autocast: bool,
    scaler: torch.amp.GradScaler | None,
) -> list[float]:
    """Trains on all batches and returns the scale after each step."""
    scales = []
    for inputs, targets in batches:
        x, y = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = nn.functional.mse_loss(model(x).float(), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return scales


def train_plainly(
    device: torch.device, *, autocast: bool, scales: bool
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Trains in plain torch on the device. Returns the parameters and the scales."""
    net = training.network(dtype=torch.float32).to(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=_SCALE) if scales else None
    batches = iter(DataLoader(data(with_inf=scales), training.BATCH))
    scales_seen = take_steps(
        batches,
        net,
        torch.optim.SGD(net.parameters(), 1e-2),
        device,
        autocast=autocast,
        scaler=scaler,
    )
    return {name: p.detach().cpu() for name, p in net.named_parameters()}, scales_seen


def with_shoal(
    strategy: str, *, autocast: bool, scales: bool
) -> tuple[dict[str, torch.Tensor], list[float]]:
    device = shoal.device()
    net = training.network(dtype=torch.float32).to(device)
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 1e-2), strategy=strategy, backend="gloo"
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=_SCALE) if scales else None
    loader = shoal.ElasticDataLoader(
        data(with_inf=scales), global_batch_size=training.BATCH, shuffle=False
    )
    scales_seen = take_steps(
        iter(loader), model, optimizer, device, autocast=autocast, scaler=scaler
    )
    return {
        name: value.cpu().clone() for name, value in model.full_state_dict().items()
    }, scales_seen


@pytest.mark.parametrize(
    ("kind", "strategy"), on_host_and_device([("ddp",), ("zero2",), ("zero3",)], quick=[("zero3",)])
)
def test_bf16_autocast_matches_plain_torch_within_bf16_precision(kind: str, strategy: str) -> None:
    is_there(kind)
    expected, _ = train_plainly(torch.device(kind), autocast=True, scales=False)
    for trained, _ in together(
        lambda: with_shoal(strategy, autocast=True, scales=False), world_size=2
    ):
        for name, value in expected.items():
            # products have 8 bits, and sums of two halves differ
            torch.testing.assert_close(trained[name], value, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "strategy"), on_host_and_device([("ddp",), ("zero2",), ("zero3",)], quick=[("zero2",)])
)
def test_inf_on_one_rank_skips_the_step_on_all_ranks_and_halves_the_scale(
    kind: str, strategy: str
) -> None:
    is_there(kind)
    expected, scales = train_plainly(torch.device(kind), autocast=False, scales=True)
    assert scales == [_SCALE] * 2 + [_SCALE / 2] * 4
    for trained, scales_seen in together(
        lambda: with_shoal(strategy, autocast=False, scales=True), world_size=2
    ):
        assert scales_seen == scales
        for name, value in expected.items():
            torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "strategy"), on_host_and_device([("ddp",), ("zero3",)], quick=[]))
def test_compiled_block_and_pinned_batches_do_not_change_the_result(
    starter: Callable[[str], Zygote], tmp_path: Path, kind: str, strategy: str
) -> None:
    is_there(kind)
    alone = torch.cat([value.flatten() for value in training.alone().values()]).tolist()
    compiled = "inductor" if kind == "cuda" else "aot_eager"
    settings = {"STRATEGY": strategy, "BACKEND": "gloo", "COMPILED": compiled, "DATA_WORKERS": "2"}
    with cluster(
        starter(kind),
        tmp_path,
        max_workers=2,
        script=Path(training.__file__),
        lease_ms=lease_ms(kind),
        **settings,
        **sharing(kind),
    ) as running:
        for index in range(2):
            running.start(index)
        results = running.finish(0, 1)
    for result in results:
        assert result["device"].partition(":")[0] == kind
        assert result["parameters"] == pytest.approx(alone, abs=1e-8)
