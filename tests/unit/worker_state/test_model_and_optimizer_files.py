"""Models and optimizers as bytes and files: data that is damaged, foreign, of another model, or
different between ranks is refused and changes nothing."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import shoal
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shoal_worker.state.digest import state_digest
from shoal_worker.state.serial import dump_tensors, load_tensors
from torch import nn

STRATEGIES = ["ddp", "zero1", "zero3", "pipeline"]
IMAGE = dump_tensors(
    {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}, {"strategy": "ddp", "world_size": 2}
)


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, len(IMAGE) - 1), bit=st.integers(0, 7), cut=st.booleans())
def test_one_flipped_bit_or_truncation_anywhere_is_detected(
    place: int, bit: int, cut: bool
) -> None:
    damaged = bytearray(IMAGE[:place] if cut else IMAGE)
    if not cut:
        damaged[place] ^= 1 << bit
    try:
        tensors, metadata = load_tensors(bytes(damaged))
    except shoal.CorruptDataError:
        return
    # Some changes are harmless, because equal JSON can be written in several ways.
    assert metadata == {"format": 1, "strategy": "ddp", "world_size": 2}
    assert state_digest(tensors) == state_digest(
        {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}
    )
    assert not cut


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
def test_tensors_of_a_dtype_unknown_to_safetensors_are_read_back(
    shape: tuple[int, ...],
) -> None:
    value = torch.full(shape, 1 + 2j, dtype=torch.complex128)
    tensors, metadata = load_tensors(dump_tensors({"c": value, "w": torch.ones(2)}, {"step": 1}))
    assert state_digest(tensors) == state_digest({"c": value, "w": torch.ones(2)})
    assert metadata == {"format": 1, "step": 1}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "FILE_CORRUPT"),
        (pickle.dumps({"w": 1}), "FILE_CORRUPT"),
        (IMAGE + b"x", "FILE_CORRUPT"),
        (safetensors.torch.save({"w": torch.ones(2)}), "FILE_FOREIGN"),
        (
            safetensors.torch.save({"w": torch.ones(2)}, {"shoal": json.dumps({"format": 2})}),
            "FILE_NEWER",
        ),
        (safetensors.torch.save({"w": torch.ones(2)}, {"shoal": json.dumps([1])}), "FILE_NEWER"),
        (
            safetensors.torch.save({"w": torch.ones(2)}, {"shoal": json.dumps({"format": 1})}),
            "FILE_CORRUPT",
        ),
    ],
)
def test_error_about_a_file_of_another_kind_names_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(shoal.CorruptDataError) as raised:
        load_tensors(data)
    assert raised.value.reason == reason


# -------------------------------------------------------------------------------------------- ranks


def trained(strategy: str, width: int = 4, make: Any = torch.optim.AdamW) -> tuple[Any, Any]:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
    model, optimizer = shoal.as_distributed(net, make(net.parameters(), 0.01), strategy=strategy)
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 2)), global_batch_size=4
    )
    for x, y in loader:
        model.train_step(x, y, nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: Any, optimizer: Any) -> int:
    return state_digest({"model": model.full_state_dict(), "optimizer": optimizer.state_dict()})


def refused(model: Any, optimizer: Any, call: Any, error: type[Exception], match: str) -> None:
    before = everything(model, optimizer)
    with pytest.raises(error, match=match):
        call()
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_damage_and_foreign_states_change_nothing_on_any_rank(
    tmp_path: Path, strategy: str
) -> None:
    def body() -> None:
        model, optimizer = trained(strategy)
        image, state = model.serialize(), optimizer.serialize()
        other = dump_tensors({"another": torch.ones(1)}, {})
        damaged = image[:-1] + bytes([image[-1] ^ 1])
        corrupt = shoal.CorruptDataError
        refused(
            model,
            optimizer,
            lambda: model.deserialize(damaged),
            corrupt,
            "does not match its digest",
        )
        refused(model, optimizer, lambda: model.deserialize(other), corrupt, "a different model")
        refused(model, optimizer, lambda: optimizer.deserialize(image), corrupt, "a model's state")
        refused(
            model,
            optimizer,
            lambda: optimizer.deserialize(state[: len(state) // 2]),
            corrupt,
            "not a complete",
        )
        saved = optimizer.state_dict()
        for change, match in [
            (lambda s: s["param_groups"][0].pop("betas"), "lack"),
            (lambda s: s["param_groups"].pop(), "its parameter groups have"),
            (
                lambda s: s["state"][0].update(exp_avg=torch.ones(9)),
                "'exp_avg' of its parameter 0 has shape",
            ),
            (lambda s: s.pop("state"), "lacks param_groups or state"),
        ]:
            changed = copy.deepcopy(saved)
            change(changed)
            refused(
                model,
                optimizer,
                lambda changed=changed: optimizer.load_state_dict(changed),
                corrupt,
                match,
            )
        path = tmp_path / f"{shoal.rank()}.safetensors"
        refused(
            model,
            optimizer,
            lambda: model.load_model(path),
            shoal.ConfigurationError,
            "cannot be read",
        )
        optimizer.load_state_dict(saved)
        model.deserialize(image)

    shoal.launch(body, world_size=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_different_states_to_load_are_reported_and_load_none(strategy: str) -> None:
    def body() -> None:
        model, optimizer = trained(strategy)
        different, rank = shoal.ConfigurationError, shoal.rank()
        images = [model.serialize(), model.with_parameters({"0.bias": torch.zeros(4)}).serialize()]
        states = [optimizer.state_dict() for _ in range(2)]
        states[1]["param_groups"][0]["lr"] = 0.5
        refused(
            model,
            optimizer,
            lambda: model.deserialize(images[rank]),
            different,
            "rank 1 was given different values",
        )
        refused(
            model,
            optimizer,
            lambda: optimizer.load_state_dict(states[rank]),
            different,
            "rank 1 was given different values",
        )
        own = {"0.bias": torch.full((4,), float(rank))}
        refused(
            model,
            optimizer,
            lambda: model.with_parameters(own),
            different,
            "rank 1 was given different values",
        )
        damaged = images[0] if rank == 0 else images[0][:50]
        kinds = [shoal.ConfigurationError, shoal.CorruptDataError]
        refused(
            model,
            optimizer,
            lambda: model.deserialize(damaged),
            kinds[rank],
            "rank 1 was given invalid values|not a complete",
        )

    shoal.launch(body, world_size=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saved_model_exists_when_any_rank_continues(tmp_path: Path, strategy: str) -> None:
    def rank() -> list[bool]:
        model, _ = trained(strategy)
        found = []
        for number in range(4):
            model.save_model(tmp_path / str(number))
            found.append((tmp_path / str(number)).exists())
        model.load_model(tmp_path / "0")
        return found

    assert shoal.launch(rank, world_size=3) == [[True] * 4] * 3


def test_a_model_that_cannot_be_written_is_reported_on_all_ranks(tmp_path: Path) -> None:
    def rank() -> None:
        model, _ = trained("ddp")
        with pytest.raises(shoal.UnavailableError, match="cannot be written"):
            model.save_model(tmp_path / "no such directory" / "model")

    shoal.launch(rank, world_size=2)


def test_single_rank_is_informed_that_the_others_are_at_another_call() -> None:
    def body() -> None:
        model, _ = trained("ddp")
        if shoal.rank() == 0:
            model.with_parameters({"0.bias": torch.zeros(4)})
        model.serialize()
        shoal.evaluate(model, [torch.ones(1, 3)], lambda net, x: {"sum": net(x).sum()})

    with pytest.raises(
        shoal.PreconditionError,
        match=r"ranks diverged \(rank 0: with_parameters, rank 1: evaluate\)",
    ):
        shoal.launch(body, world_size=2)


def test_clone_can_be_loaded_on_one_rank_alone() -> None:
    def body() -> bool:
        model, _ = trained("ddp")
        if shoal.rank() == 0:
            clone = model.clone()
            clone.with_parameters({"0.bias": torch.ones(4)}).deserialize(model.serialize())
            return bool(clone.module[0].bias.equal(model.module[0].bias))
        return True

    assert shoal.launch(body, world_size=2) == [True, True]


# -------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("reader", STRATEGIES)
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"width": 5}, shoal.CorruptDataError, "a different model"),
        ({"make": torch.optim.SGD}, shoal.CorruptDataError, r"lack \['betas'|another optimizer"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_changes_nothing(
    tmp_path: Path, reader: str, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    def save() -> None:
        trained("zero1", **change)
        shoal.save_checkpoint(tmp_path)

    def load() -> None:
        model, optimizer = trained(reader)
        refused(model, optimizer, lambda: shoal.resume(tmp_path), error, match)

    shoal.launch(save, world_size=2)
    shoal.launch(load, world_size=2)


@pytest.mark.parametrize("reader", ["ddp", "zero3"])
def test_checkpoint_with_an_unsuitable_cursor_or_registered_state_changes_nothing(
    tmp_path: Path, reader: str
) -> None:
    class Picky:
        def __init__(self, accepts: bool) -> None:
            self.accepts = accepts

        def state_dict(self) -> dict[str, Any]:
            return {"value": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if not self.accepts:
                raise shoal.CorruptDataError("this is no state of mine")

    def save() -> None:
        trained("ddp")
        shoal.register_state(picky=Picky(accepts=True))
        shoal.save_checkpoint(tmp_path)

    def load() -> None:
        model, optimizer = trained(reader)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
        shoal.register_state(scheduler=scheduler, picky=Picky(accepts=False))
        refused(
            model,
            optimizer,
            lambda: shoal.resume(tmp_path),
            shoal.CorruptDataError,
            "no state of mine",
        )

    shoal.launch(save, world_size=1)
    shoal.launch(load, world_size=2)
