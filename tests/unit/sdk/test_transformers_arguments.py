"""Shoal's Trainer for transformers: the arguments that it refuses, and what its arguments tell
transformers about the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_worker.elastic.session.worker_process import current_session, set_session
from torch import nn

# importing transformers takes almost ten seconds
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_session")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(x)
        return {"loss": nn.functional.mse_loss(found.view(-1), y.view(-1)), "logits": found}


DATA = [{"x": torch.full((4,), float(number)), "y": torch.ones(1)} for number in range(8)]


def make(
    directory: str | Path,
    *,
    strategy: str = "ddp",
    options: dict[str, Any] | None = None,
    compute_metrics: Callable[[Any], dict[str, Any]] | None = None,
    **arguments: Any,
) -> Any:
    from shoal.integrations.transformers import Trainer, TrainingArguments

    common = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 2}
    return Trainer(
        Net(),
        TrainingArguments(str(directory), **common | arguments),
        train_dataset=DATA,
        strategy=strategy,
        strategy_options=options,
        compute_metrics=compute_metrics,
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            {"strategy": "tensor"},
            "strategy='tensor': expected one of ddp, zero1, zero2, zero3, fsdp, hsdp",
        ),
        (
            {"auto_find_batch_size": True},
            "auto_find_batch_size=True is not supported by Shoal's Trainer: the batch size",
        ),
        (
            {"include_for_metrics": ["loss"]},
            r"include_for_metrics=\['loss'\] is not supported by Shoal's Trainer",
        ),
        ({"torch_compile": True}, "pass the Trainer a compiled model"),
        ({"fp16": True, "use_cpu": True}, "fp16=True needs a GPU"),
        ({"fp16_full_eval": True}, "fp16_full_eval=True is not supported by Shoal's Trainer"),
        (
            {"options": {"deterministic": True}},
            "deterministic=True is not supported with gradient_accumulation_steps=1",
        ),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigurationError, match=error):
        make(tmp_path, **arguments)


def test_transformers_own_arguments_are_refused(tmp_path: Path) -> None:
    import transformers
    from shoal.integrations.transformers import Trainer

    with pytest.raises(
        ConfigurationError, match=r"expected a shoal\.integrations\.transformers\.TrainingArguments"
    ):
        Trainer(
            Net(),
            transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
            train_dataset=DATA,
        )


def test_transformers_sees_each_worker_as_a_single_process_under_any_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path)  # opens a session for a single process
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    again = make(tmp_path)
    assert (again.args.world_size, again.args.process_index, again.args.n_gpu) == (1, 0, 0)
    assert again.accelerator.num_processes == 1
    assert not torch.distributed.is_initialized()
    assert trainer.args.device == torch.device("cpu")


def test_a_process_trains_once(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert trainer.train().global_step == 2
    with pytest.raises(PreconditionError, match=r"train\(\) was called twice"):
        trainer.train()


def test_metrics_of_evaluations_are_reported_beside_the_loss(tmp_path: Path) -> None:
    def train() -> dict[str, float]:
        trainer = make(
            tmp_path,
            compute_metrics=lambda _: {"accuracy": 0.5, "note": "text"},
            label_names=["y"],
        )
        trainer.train()
        trainer.evaluate(DATA)
        reported = current_session().progress.reported
        return {name: float(each.value) for name, each in reported.items() if name != "loss"}

    (reported,) = shoal.launch(train, world_size=1)
    assert reported.keys() == {"eval_loss", "eval_accuracy"}
    assert reported["eval_accuracy"] == 0.5
    assert 0 < reported["eval_loss"] < 100


URL = "memory://bucket/run"


def test_checkpoints_go_to_a_url_and_the_next_run_resumes_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only the checkpoints do: transformers' own files have no directory there, and no directory
    with the name of the URL is created."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_STAGING_DIR", str(tmp_path / "staging"))
    fsspec.filesystem("memory").store.clear()
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}

    def train(steps: int) -> tuple[int, int]:
        trainer = make(URL, max_steps=steps, **options)
        seen: list[int] = []
        trainer.training_step = _counted(trainer.training_step, seen)
        trainer.train(resume_from_checkpoint=True)
        with pytest.raises(ConfigurationError, match="expected a local directory"):
            trainer.save_model()
        trainer.model_wrapped.save_model(f"{URL}/model.safetensors")
        trainer.save_model(str(tmp_path / "model"))
        shoal.shutdown()
        return trainer.state.global_step, len(seen)

    assert shoal.launch(train, 2, world_size=1) == [(2, 2)]
    assert shoal.launch(train, 3, world_size=1) == [(3, 1)]
    assert shoal.load_full_state(URL)["layer.weight"].shape == (1, 4)
    assert (tmp_path / "model").is_dir()
    assert not list(tmp_path.glob("memory*"))


def _counted(training_step: Callable[..., Any], seen: list[int]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        seen.append(1)
        return training_step(*arguments)

    return counted


def test_progress_in_an_epoch_counts_batches_as_transformers_does(tmp_path: Path) -> None:
    """Four batches of two samples: the first step has three, the last one has one."""
    import transformers

    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "logging_steps": 1,
        "max_steps": 4,
    }
    trainer = make(tmp_path, **arguments)
    trainer.train()
    settings = transformers.TrainingArguments(
        str(tmp_path),
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        **arguments,
    )
    theirs = transformers.Trainer(Net(), settings, train_dataset=DATA)
    theirs.train()
    epochs = [
        [entry["epoch"] for entry in each.state.log_history if "loss" in entry]
        for each in (trainer, theirs)
    ]
    assert epochs == [[0.75, 1.0, 1.75, 2.0]] * 2


def test_output_dir_of_another_run_is_refused_before_the_first_step(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"save_strategy": "steps", "per_device_train_batch_size": 2}
    make(tmp_path, **arguments, max_steps=4, save_steps=4).train()
    shoal.shutdown()
    set_session(None)
    trainer = make(tmp_path, **arguments, max_steps=4, save_steps=3)
    with pytest.raises(ConfigurationError, match=r"step-4 of another run.*resume_from_checkpoint"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert current_session().steps == 0


def test_the_best_model_cannot_be_loaded_from_a_url() -> None:
    with pytest.raises(ConfigurationError, match=r"load_full_state\(output_dir, best=True\)"):
        make(
            URL,
            load_best_model_at_end=True,
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=1,
            save_steps=1,
        )


def test_a_file_url_is_a_directory(tmp_path: Path) -> None:
    assert make(tmp_path.as_uri()).args.output_dir == str(tmp_path)


def test_data_loader_that_cannot_be_dealt_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(DATA)
    with pytest.raises(
        ConfigurationError,
        match=r"get_train_dataloader\(\) returned a DataLoader; expected a shoal\.Elastic",
    ):
        trainer.train()


def test_fp16_step_with_overflowing_gradients_counts_and_updates_nothing(
    tmp_path: Path,
) -> None:
    """With fp16, a step whose gradients overflow counts but updates nothing. The test runs in
    float32 on a CPU, with the scaler that Accelerate makes on a GPU."""
    from transformers import TrainerCallback

    trainer = make(tmp_path, max_steps=8, learning_rate=1e-3, optim="sgd")
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    seen: list[tuple[float, bool, float]] = []
    weights = trainer.model.layer.weight

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.before = weights.detach().clone()

        def on_step_end(self, *_: Any, lr_scheduler: Any, **__: Any) -> None:
            updated = not torch.equal(self.before, weights)
            seen.append((scaler.get_scale(), updated, lr_scheduler.get_last_lr()[0]))

    trainer.add_callback(Watch())
    assert trainer.train().global_step == 8
    scales, updates, rates = zip((2.0**127, True, 1e-3), *seen, strict=True)
    assert {True, False} == set(updates[1:])
    for before, after, updated in zip(scales, scales[1:], updates[1:], strict=False):
        assert after == (before if updated else before / 2)
    expected = [1e-3 * (1 - sum(updates[1 : step + 1]) / 8) for step in range(9)]
    assert rates == pytest.approx(expected), "the schedule starts with the first update"
