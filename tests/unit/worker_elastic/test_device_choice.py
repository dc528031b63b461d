"""The device of a rank is chosen by its number on its machine."""

from __future__ import annotations

import pytest
import shoal
import torch


def test_device_without_cuda_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert shoal.launch(shoal.device, world_size=2) == [torch.device("cpu")] * 2


@pytest.mark.parametrize(
    ("visible", "chosen"), [(4, [0, 1, 2, 3]), (2, [0, 1, 0, 1]), (1, [0, 0, 0, 0])]
)
def test_workers_take_visible_devices_in_turn(
    monkeypatch: pytest.MonkeyPatch, visible: int, chosen: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert shoal.launch(shoal.device, world_size=4) == [
        torch.device("cuda", index) for index in chosen
    ]
