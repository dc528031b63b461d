"""Frozen parameters in checkpoints: written once, or only their digests, and always exact."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import CorruptDataError
from shoal_worker.checkpoint.files import read_checkpoint, write_checkpoint
from shoal_worker.checkpoint.manifest import CheckpointInfo
from shoal_worker.state.digest import describe_values, part_digest
from shoal_worker.state.tree import Snapshot
from torch import nn

WIDTH, RANK = 256, 4
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128]


class Adapted(nn.Module):
    """A large frozen layer with a small adapter, and a frozen average of the adapter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        torch.manual_seed(0)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.average = nn.Parameter(self.up.weight.detach().clone(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.up(self.down(x))
        return adapted


def train(
    strategy: str,
    directory: Path,
    *,
    epochs: int,
    seed: int = 1,
    averages: bool = False,
    **save: Any,
) -> dict[str, torch.Tensor]:
    """Trains from the newest checkpoint, if any; saves after each epoch of two steps. `averages`:
    changes the frozen average through `.data`, which torch's version counters do not show."""
    net = Adapted(seed)
    model, optimizer = shoal.as_distributed(
        net,
        torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2),
        strategy=strategy,
    )
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0))
    loader = shoal.ElasticDataLoader(torch.utils.data.TensorDataset(x, x), global_batch_size=12)
    shoal.resume(directory)
    for _ in loader.epochs(epochs):
        for inputs, targets in loader:
            model.train_step(inputs, targets, nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
            if averages:
                net.average.data.mul_(0.5).add_(net.up.weight.detach())
        shoal.save_checkpoint(directory, **save)
    return model.full_state_dict()


def launch(strategy: str, directory: Path, *, ranks: int = 1, **options: Any) -> Any:
    return shoal.launch(functools.partial(train, strategy, directory, **options), world_size=ranks)[
        0
    ]


def frozen_files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("frozen-*.safetensors"))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_is_the_sum_over_any_parts(dtype: torch.dtype) -> None:
    values = torch.randn(600_001).to(dtype)
    cuts = [0, 1, 262_143, 262_145, 600_001]
    parts = [part_digest(values[a:b], a) for a, b in itertools.pairwise(cuts)]
    assert sum(parts) % 2**64 == part_digest(values, 0)


def test_digest_detects_changed_and_swapped_elements_dtypes_and_shapes() -> None:
    values = torch.randn(4, 3)
    changed, exchanged = values.clone(), values.clone()
    changed[1, 1] *= -1
    exchanged[0], exchanged[1] = values[1], values[0]
    others = [changed, exchanged, values.reshape(3, 4), values.view(torch.int32), values.double()]
    assert all(describe_values(other) != describe_values(values) for other in others)


def test_frozen_values_are_written_once_and_removed_with_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    state = launch("ddp", tmp_path, epochs=3, keep=2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step-4", "step-6"]
    (file,), (same,) = (frozen_files(tmp_path / name) for name in kept)
    assert file.samefile(same)
    assert file.stat().st_nlink == 2  # those of step-2 are gone
    new = sum(f.stat().st_size for f in (tmp_path / "step-6").iterdir() if f != same)
    trained = 2 * WIDTH * RANK * 4
    headers = (tmp_path / "step-6" / "checkpoint.json").stat().st_size + 2 * 1024
    assert new - headers < 1.1 * 3 * trained  # values and two moments
    assert_equal(shoal.load_full_state(tmp_path), state)
    moved = tmp_path / "step-6"
    moved.rename(tmp_path / "elsewhere")  # each checkpoint is complete
    assert_equal(shoal.load_full_state(tmp_path / "elsewhere"), state)


def test_frozen_values_are_copied_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    state = launch("ddp", tmp_path, epochs=2, keep=1)
    (file,) = frozen_files(tmp_path / "step-4")
    assert file.stat().st_nlink == 1
    assert_equal(shoal.load_full_state(tmp_path), state)


@pytest.mark.parametrize("frozen", ["write", "reference"])
def test_a_frozen_parameter_that_changes_is_saved_with_every_checkpoint(
    tmp_path: Path, frozen: str
) -> None:
    state = launch("ddp", tmp_path, epochs=2, averages=True, frozen=frozen)
    entry = json.loads((tmp_path / "step-4" / "checkpoint.json").read_text())["frozen"]
    assert entry["tensors"].keys() == {"model/base.weight", "model/base.bias"}
    base = Adapted(1) if frozen == "reference" else None
    assert_equal(shoal.load_full_state(tmp_path, base=base), state)


@pytest.mark.parametrize(
    ("saves", "loads"), [("zero3", "ddp"), ("ddp", "fsdp"), ("zero2", "zero3")]
)
def test_references_load_into_any_strategy_and_number_of_ranks(
    tmp_path: Path, saves: str, loads: str
) -> None:
    straight = launch(saves, tmp_path / "straight", ranks=3, epochs=2)
    launch(saves, tmp_path / "parts", ranks=3, epochs=1, frozen="reference")
    assert not frozen_files(tmp_path / "parts" / "step-2")
    resumed = launch(loads, tmp_path / "parts", ranks=2, epochs=2, frozen="reference")
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6)


def test_shards_with_frozen_values_are_shared_by_later_runs_of_other_strategies(
    tmp_path: Path,
) -> None:
    launch("zero3", tmp_path, ranks=3, epochs=1)
    state = launch("ddp", tmp_path, ranks=2, epochs=2)
    first, second = (frozen_files(tmp_path / f"step-{step}") for step in (2, 4))
    assert len(first) > 1
    assert all(a.samefile(b) for a, b in zip(first, second, strict=True))
    assert_equal(shoal.load_full_state(tmp_path), state)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_reference_to_another_base_model_is_refused(tmp_path: Path, strategy: str) -> None:
    launch(strategy, tmp_path, ranks=2, epochs=1, frozen="reference")
    received = (
        r"without the values of frozen parameter 'base\.weight': "
        r"they are float32 \[256, 256\] with digest [0-9a-f]{16}, but this process's model has "
        r"float32 \[256, 256\] with digest [0-9a-f]{16}; load the same base model before"
    )
    with pytest.raises(CorruptDataError, match=received) as refused:
        launch(strategy, tmp_path, ranks=2, epochs=2, seed=2)
    assert refused.value.reason == "BASE_MODEL_DIFFERS"
    with pytest.raises(CorruptDataError, match="has no values of it"):
        shoal.load_full_state(tmp_path)
    with pytest.raises(CorruptDataError, match=r"base\.weight"):
        shoal.load_full_state(tmp_path, base=Adapted(2))
    assert shoal.load_full_state(tmp_path, base=Adapted(1)).keys() == Adapted(1).state_dict().keys()


def test_values_resumed_from_files_stay_frozen_under_another_base_model(tmp_path: Path) -> None:
    launch("ddp", tmp_path, epochs=1)
    state = launch("ddp", tmp_path, epochs=2, seed=2)  # its own base is replaced
    (first,), (second,) = (frozen_files(tmp_path / f"step-{step}") for step in (2, 4))
    assert first.samefile(second)
    assert_equal({"weight": state["base.weight"]}, {"weight": Adapted(1).base.weight})


def test_checkpoints_of_earlier_releases_load(tmp_path: Path) -> None:
    state = launch("ddp", tmp_path, epochs=1)
    written = read_checkpoint(tmp_path / "step-2")
    old = tmp_path / "old"
    info = CheckpointInfo(step=2, strategy="ddp", world_size=1, generation=0)
    write_checkpoint(old, Snapshot.take(written.state), info, fence=lambda: None, keep=1)
    assert json.loads((old / "step-2" / "checkpoint.json").read_text())["version"] == 1
    assert_equal(shoal.load_full_state(old), state)
    launch("zero3", old, ranks=2, epochs=2, seed=2)
    assert_equal(
        {"weight": shoal.load_full_state(old)["base.weight"]}, {"weight": Adapted(1).base.weight}
    )
