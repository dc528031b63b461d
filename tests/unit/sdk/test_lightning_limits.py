"""Limited epochs and evaluations, several validation loaders and weights from a file behave as
under Lightning's own strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from torch import nn
from torch.utils.data import DataLoader, StackDataset, TensorDataset

# importing Lightning takes some seconds
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fresh_session"),
    pytest.mark.filterwarnings("ignore::Warning"),
]

X = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def make_net() -> Any:
    import lightning

    class Net(lightning.LightningModule):
        """A module that records the sizes of its batches by kind."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layer = nn.Linear(4, 1)
            self.seen: dict[str, list[int]] = {}

        def step(self, kind: str, batch: Any) -> torch.Tensor:
            x, y = (batch["x"][0], batch["y"][0]) if isinstance(batch, dict) else batch
            self.seen.setdefault(kind, []).append(len(x))
            return nn.functional.mse_loss(self.layer(x), y)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.step("train", batch)
            self.log("loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log(
                f"val{dataloader_idx}",
                self.step(f"val{dataloader_idx}", batch),
                add_dataloader_idx=False,
            )

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.step("test", batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net()


def make_trainer(ours: bool, **arguments: Any) -> Any:
    import lightning
    from shoal.integrations.lightning import ShoalStrategy

    common: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "num_sanity_val_steps": 0,
    }
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    strategy = {"strategy": ShoalStrategy("ddp")} if ours else {}
    return lightning.Trainer(**(common | quiet | strategy | arguments))


def results_of(ours: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Fits, tests and predicts, and returns the results."""
    net, trainer = make_net(), make_trainer(ours, **arguments)
    trainer.fit(
        net,
        DataLoader(DATA, batch_size=4),
        [DataLoader(DATA, batch_size=5), DataLoader(DATA, batch_size=3)],
    )
    measured = {name: float(value) for name, value in trainer.callback_metrics.items()}
    result = {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "weight": net.layer.weight.detach().flatten().tolist(),
    }
    (tested,) = trainer.test(net, DataLoader(DATA, batch_size=4), verbose=False)
    predicted = trainer.predict(net, DataLoader(DATA, batch_size=4))
    return (
        result
        | measured
        | tested
        | {"predictions": torch.cat(predicted).flatten().tolist(), "seen": net.seen}
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {
            "limit_train_batches": 3,
            "limit_val_batches": 2,
            "limit_test_batches": 4,
            "limit_predict_batches": 1,
        },
        {
            "limit_train_batches": 0.5,
            "limit_val_batches": 0.4,
            "limit_test_batches": 0.7,
            "limit_predict_batches": 1.0,
        },
        {"limit_train_batches": 100, "limit_val_batches": 0, "limit_test_batches": 100},
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"overfit_batches": 2},
        {"overfit_batches": 0.4},
    ],
    ids=str,
)
def test_limits_match_lightnings_own_strategy(arguments: dict[str, Any]) -> None:
    """Limits have the same effect as under Lightning's own strategy, for a module with several
    validation loaders."""
    ours, its = results_of(True, arguments), results_of(False, arguments)
    assert ours.pop("seen") == its.pop("seen")
    assert ours.keys() == its.keys()
    assert ours == {name: pytest.approx(value, abs=1e-6) for name, value in its.items()}


def test_limited_shuffled_epoch_takes_different_samples_each_time() -> None:
    from shoal.integrations.lightning.data import FirstSamples, training_loader

    given = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True)
    loader = training_loader(given, accumulated=2, seed=0, deterministic=False, limit=5)
    assert len(loader) == 3
    epochs = [list(FirstSamples(given.sampler, 20)) for _ in range(2)]
    assert [len(set(epoch)) for epoch in epochs] == [20, 20]
    assert set(epochs[0]) != set(epochs[1])


def test_overfitting_turns_shuffling_off_for_validation_as_well() -> None:
    net, trainer = make_net(), make_trainer(True, overfit_batches=1)
    trainer.fit(
        net,
        DataLoader(DATA, batch_size=4, shuffle=True),
        DataLoader(DATA, batch_size=4, shuffle=True),
    )
    assert net.seen == {"train": [4, 4], "val0": [4, 4]}


def test_weights_file_is_tested_in_a_job_of_its_own(tmp_path: Path) -> None:
    plain = make_trainer(False)
    trained = make_net()
    plain.fit(trained, DataLoader(DATA, batch_size=4))
    plain.save_checkpoint(tmp_path / "model.ckpt")
    expected = plain.test(trained, DataLoader(DATA, batch_size=4), verbose=False)
    net = make_net()
    found = make_trainer(True).test(
        net, DataLoader(DATA, batch_size=4), ckpt_path=str(tmp_path / "model.ckpt"), verbose=False
    )
    assert found[0]["test"] == pytest.approx(expected[0]["test"], abs=1e-6)
    torch.testing.assert_close(net.layer.weight, trained.layer.weight)


def test_a_limit_with_a_loader_of_shoals_own_is_refused() -> None:
    import shoal

    loader = shoal.ElasticDataLoader(DATA, global_batch_size=4)
    with pytest.raises(
        ConfigurationError,
        match=r"limit_train_batches=2 is not supported with a shoal.ElasticDataLoader as "
        r"train_dataloader",
    ):
        make_trainer(True, limit_train_batches=2).fit(make_net(), loader)


def test_several_training_loaders_are_refused() -> None:
    both = {"one": DataLoader(DATA, batch_size=4), "other": DataLoader(DATA, batch_size=4)}
    with pytest.raises(
        ConfigurationError,
        match=r"train_dataloader: found 2 loaders, .*torch.utils.data.StackDataset",
    ):
        make_trainer(True).fit(make_net(), both)


def test_combined_datasets_train() -> None:
    net = make_net()
    side_by_side = StackDataset(x=TensorDataset(X), y=TensorDataset(X.sum(1, keepdim=True)))
    make_trainer(True).fit(net, DataLoader(side_by_side, batch_size=8))
    assert net.seen["train"] == [8, 8, 6] * 2


def test_checkpoints_go_to_a_url_and_the_next_fit_resumes_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from shoal.integrations.lightning import Checkpoints

    url = "memory://bucket/fit"
    monkeypatch.setenv("SHOAL_STAGING_DIR", str(tmp_path / "staging"))
    fsspec.filesystem("memory").store.clear()

    def fit(epochs: int) -> int:
        net, callback = make_net(), Checkpoints(url, resume=True)
        trainer = make_trainer(
            True, max_epochs=epochs, callbacks=[callback], enable_checkpointing=True
        )
        trainer.fit(net, DataLoader(DATA, batch_size=11))
        shoal.shutdown()
        return len(net.seen["train"])

    assert shoal.launch(fit, 1, world_size=1) == [2]
    assert shoal.launch(fit, 2, world_size=1) == [2]
    assert shoal.load_full_state(url)["layer.weight"].shape == (1, 4)
