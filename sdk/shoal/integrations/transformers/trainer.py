"""Elastic Trainer. The training loop works as in ordinary scripts with Shoal (an
`ElasticDataLoader`, `as_distributed`, `if optimizer.step():`). Everything else is inherited from
transformers' Trainer: the loss, the optimizer and its schedule, callbacks, logging, evaluation and
saving.

transformers and Accelerate treat each worker as the only process, so they open no process group.
The batch size in the arguments applies to the entire job, regardless of the number of workers: a
step covers `per_device_train_batch_size * gradient_accumulation_steps` samples over all ranks.
Unsupported uses are rejected when the Trainer is created
(docs/decisions/0263-own-loops-for-trainers.md).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_common.formats.tally import MOST_METRICS
from shoal_worker import api
from shoal_worker.checkpoint.place import Place
from shoal_worker.checkpoint.saving import CheckpointSaver
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.object_storage import is_url
from shoal_worker.strategies.model import ShardedModel
from torch import nn
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize

from shoal.integrations.dealt import evaluate_on_all
from shoal.integrations.transformers.arguments import (
    TrainingArguments,
    check_arguments,
    check_class,
    lengths,
    order_of,
    progress_in_epoch,
)
from shoal.integrations.transformers.evaluation import concatenated
from shoal.integrations.transformers.loop_counters import Progress


class Trainer(transformers.Trainer):
    """Trainer of transformers whose training survives the death of workers and lets new workers
    join.

    Every rank must create the Trainer and call the same methods in the same order: `train`,
    `evaluate`, `predict`, `save_model`. A process trains one model, so `train` is called at most
    once.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = TrainingArguments
    """Class of `args`."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *rest: Any,
        strategy: str = "ddp",
        strategy_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """
        Args:
            model, args, rest, named: as in transformers' own Trainer; `args` is a
                `TrainingArguments` of this module.
            strategy: "ddp", "zero1", "zero2", "zero3", "fsdp" or "hsdp".
            strategy_options: further arguments of `shoal.as_distributed`.

        Raises:
            ConfigurationError: a different strategy, or arguments that this Trainer does not
                support.
        """
        check_class(type(self))
        args = self.arguments_class("tmp_trainer") if args is None else args
        options = dict(strategy_options or {})
        check_arguments(args, strategy, options, expected=self.arguments_class)
        self._strategy, self._options = strategy, options
        self._resume_from: str | Path | None = None
        self._trained = False
        output_dir = args.output_dir
        if not is_url(output_dir):
            super().__init__(model, args, *rest, **named)
            return
        # transformers creates a local directory with the name of output_dir
        with tempfile.TemporaryDirectory(prefix="shoal-trainer-") as args.output_dir:
            super().__init__(model, args, *rest, **named)
        args.output_dir = output_dir

    model: Any
    """The script's module."""
    model_wrapped: Any
    """The model. The first call that needs it distributed replaces it by a `ShardedModel`."""
    optimizer: Any
    """Optimizer of the model. It becomes a `ShardedOptimizer` when the model is distributed."""
    control: Any
    """transformers' TrainerControl."""

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator. Called by transformers."""
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigurationError(
                "Accelerate's environment (ACCELERATE_USE_DEEPSPEED, ACCELERATE_USE_FSDP) "
                "conflicts with strategy=, which shards the model here; start the script with "
                "`shoal run` instead of `accelerate launch`"
            )
        unwrap = self.accelerator.unwrap_model

        def unwrap_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return unwrap(
                model.module if isinstance(model, ShardedModel) else model, *args, **kwargs
            )

        self.accelerator.unwrap_model = unwrap_model

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """Returns the context for computing the loss: autocast with bf16=True or fp16=True,
        otherwise an empty context."""
        return self.accelerator.autocast()

    # ----------------------------------------------------------------------------------------- data

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        args, collator = self.args, self.data_collator
        if transformers.utils.is_datasets_available() and _is_hf_dataset(dataset):
            dataset = self._remove_unused_columns(dataset, description=description)
        else:
            collator = self._get_collator_with_removed_columns(collator, description=description)
        common = {
            "collate_fn": collator,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
        }
        if not is_training:
            return ElasticDataLoader(dataset, global_batch_size=batch_size, train=False, **common)
        in_parts = args.gradient_accumulation_steps > 1
        divides_by_items = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        weighed = divides_by_items and self.loss_is_scaled_for_ga is not False
        return ElasticDataLoader(
            dataset,
            global_batch_size=batch_size * args.gradient_accumulation_steps,
            micro_batch_size=batch_size if in_parts else None,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            weight_fn=self._weight if weighed else None,
            name="trainer",
            **order_of(dataset, sampler_fn),
            **common,
        )

    def _weight(self, batch: Any) -> float:
        """Returns a batch's weight in the mean over a step. If the model divides its loss by a
        number of items, this is that number; otherwise it is the number of samples."""
        items = self._get_num_items_in_batch([batch], self.args.device)
        return float(find_batch_size(batch) or 1) if items is None else float(items)

    # ------------------------------------------------------------------------------------- training

    def _distribute(self) -> ShardedModel:
        """Distributes the model and its optimizer on the first call. Returns the distributed
        model."""
        if isinstance(self.model_wrapped, ShardedModel):
            return self.model_wrapped
        if self.optimizer is None:
            self.create_optimizer()
        model, self.optimizer = api.as_distributed(
            self.model, self.optimizer, strategy=self._strategy, **self._options
        )
        assert isinstance(model, ShardedModel)
        self.model_wrapped = model
        return model

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        """Trains like transformers' own Trainer. Workers may die and join during training.

        Args:
            resume_from_checkpoint: directory or URL of checkpoints; resumes from the newest
                checkpoint in it, if there is one. True: `output_dir`.
            trial: must be None.
            ignore_keys_for_eval: as in transformers' own Trainer.

        Raises:
            PreconditionError: `train` was already called in this process.
            ConfigurationError: a trial was given.
        """
        if trial is not None:
            raise ConfigurationError(
                "train(trial=...) trains several models, but a job trains one; start a job for "
                "each trial"
            )
        if self._trained:
            raise PreconditionError(
                "train() was called twice, but a job's process trains only once; start another job "
                "for another run"
            )
        self._trained = True
        if resume_from_checkpoint:
            self._resume_from = (
                self.args.output_dir if resume_from_checkpoint is True else resume_from_checkpoint
            )
        return super().train(None, None, ignore_keys_for_eval)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Trains with the elastic loop. Called by `train`."""
        args, session = self.args, current_session()
        model, loader = self._distribute(), self.get_train_dataloader()
        if not isinstance(loader, ElasticDataLoader):
            raise ConfigurationError(
                f"get_train_dataloader() returned a {type(loader).__name__}; expected a "
                "shoal.ElasticDataLoader, which deals its samples to all current workers. Pass the "
                "Trainer a train_dataset, and do not override the method"
            )
        steps_in_epoch, epochs, max_steps = lengths(args, loader)
        self.create_scheduler(num_training_steps=max_steps)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader

        self.state = TrainerState(train_batch_size=self._train_batch_size)
        self.state.compute_steps(args, max_steps)
        self.state.init_training_references(self, max_steps, epochs, None)
        self._tr_loss, self._total_loss_scalar = torch.zeros((), dtype=torch.float64), 0.0
        self._globalstep_last_logged = self._initial_global_step = 0
        self._initial_num_input_tokens_seen = 0
        self._register_state()
        if self._resume_from is not None:
            api.resume(self._resume_from)

        remaining = loader.epochs(epochs, max_steps=max_steps)
        # from here on, a joining worker has the other workers' state
        first = next(remaining, None)
        self._note_who_writes()
        start_time = time.time()
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start and self.state.global_step == 0 and not session.is_joining:
            self._evaluate(None, ignore_keys_for_eval, skip_scheduler=True)
        for epoch in itertools.chain([] if first is None else [first], remaining):
            if self.state.global_step >= max_steps:
                break
            self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self._train_epoch(
                model, loader, epoch, steps_in_epoch, start_time, ignore_keys_for_eval
            )
            if self.control.should_training_stop:
                break
        if (
            self.state.global_step < max_steps
            and not self.control.should_training_stop
            and args.save_strategy != "no"
        ):
            self._save_checkpoint(model, None)  # all have been asked to leave
        return self._finalize_training(None, max_steps * loader.plan.global_batch_size, start_time)

    def _announce_saves(self, steps_in_epoch: int) -> None:
        """Raises ConfigurationError if `output_dir` contains checkpoints of another run because of
        which the first save would be refused."""
        session, strategy = current_session(), self.args.save_strategy
        if strategy in ("steps", "epoch"):
            every = self.state.save_steps if strategy == "steps" else steps_in_epoch
            CheckpointSaver.of(session).announce(
                session, self.args.output_dir, step=(session.steps // every + 1) * every
            )

    def _register_state(self) -> None:
        """Registers the state that joiners receive and checkpoints contain. Called once, before
        training or resuming."""
        current_session().registered.register("trainer", Progress(self))

    def _train_epoch(
        self,
        model: ShardedModel,
        loader: ElasticDataLoader,
        epoch: int,
        steps_in_epoch: int,
        start_time: float,
        ignore_keys: Any,
    ) -> None:
        session, logged = current_session(), {"grad_norm": None, "learning_rate": None}

        def log_save_evaluate() -> None:
            self._note_who_writes()
            self._maybe_log_save_evaluate(
                self._tr_loss,
                logged["grad_norm"],
                model,
                None,
                epoch,
                ignore_keys,
                start_time,
                learning_rate=logged["learning_rate"],
            )

        for step in loader.steps():
            self._note_who_writes()
            self._announce_saves(steps_in_epoch)
            if self._train_step(model, step, logged):
                self.state.global_step = loader.global_step
                self.state.epoch = epoch + progress_in_epoch(
                    loader, step.number + 1, steps_in_epoch
                )
                self.control = self.callback_handler.on_step_end(
                    self.args, self.state, self.control
                )
                log_save_evaluate()
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        stopped = self.control.should_epoch_stop or self.control.should_training_stop
        if session.is_joining or session.is_redoing or (loader.epoch <= epoch and not stopped):
            return  # steps will be repeated, or the job was stopped within the epoch
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        log_save_evaluate()

    def _train_step(
        self, model: ShardedModel, batches: Iterable[Any], logged: dict[str, Any]
    ) -> bool:
        """Performs one step on all ranks. Returns whether the step was committed, which is the same
        on all ranks. If the step was aborted, the loader deals its samples again."""
        args, session, handler = self.args, current_session(), self.callback_handler
        self.control = handler.on_step_begin(args, self.state, self.control)
        # the step's value is the mean over its parts, weighted by the parts' weights
        self.current_gradient_accumulation_steps = 1
        total = weights = 0.0
        for number, inputs in enumerate(batches):
            if number:
                self.control = handler.on_substep_end(args, self.state, self.control)
            items = self._get_num_items_in_batch([inputs], args.device)
            loss = float(
                self.training_step(model, inputs, None if items is None else items.clamp(min=1))
            )
            if session.step is not None and session.step.micro_batch:
                total, weights = (
                    total + loss * session.step.micro_batch,
                    weights + session.step.micro_batch,
                )
                session.step.loss = total / weights
        self._passes_done()
        scaler = self.accelerator.scaler  # with fp16=True, otherwise None
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        logged["grad_norm"] = (
            model.clip_grad_norm_(args.max_grad_norm) if args.max_grad_norm > 0 else None
        )
        self.control = handler.on_pre_optimizer_step(args, self.state, self.control)
        step = session.step
        committed, updated = self._step_optimizer(scaler)
        if committed:
            self.control = handler.on_optimizer_step(args, self.state, self.control)
            logged["learning_rate"] = self._get_learning_rate()
            if updated and not self._scheduled_by_metric:
                self.lr_scheduler.step()
            self._add_loss(step.mean_loss if step is not None else None)
        self.optimizer.zero_grad()
        return committed

    def _passes_done(self) -> None:
        """Hook that is called in each step after this rank's passes, before gradients are
        clipped."""

    def _step_optimizer(self, scaler: torch.amp.GradScaler | None) -> tuple[bool, bool]:
        """Takes the optimizer's step. Returns whether the step was committed, and whether it
        updated the parameters. As in transformers, a step whose gradients overflow under fp16 is
        counted, although it does not update the parameters."""
        if scaler is None:
            committed = bool(self.optimizer.step())
            return committed, committed
        before = scaler.get_scale()
        committed = bool(scaler.step(self.optimizer))
        scaler.update()  # has no effect if the step was aborted
        return committed, committed and scaler.get_scale() >= before

    @property
    def _scheduled_by_metric(self) -> bool:
        return isinstance(
            self.lr_scheduler,
            (torch.optim.lr_scheduler.ReduceLROnPlateau, transformers.optimization.GreedyLR),
        )

    def _add_loss(self, loss: float | None) -> None:
        """Adds the mean loss of all samples of a step, the same on all ranks. As in transformers, a
        NaN or infinite loss is replaced by the mean of earlier losses."""
        if loss is None or (self.args.logging_nan_inf_filter and not math.isfinite(loss)):
            self._tr_loss += self._tr_loss / (
                1 + self.state.global_step - self._globalstep_last_logged
            )
        else:
            self._tr_loss += loss

    def _note_who_writes(self) -> None:
        """Updates which rank logs and writes files. If that rank dies, another rank takes over."""
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.state.is_world_process_zero = self.is_world_process_zero()

    # ----------------------------------------------------------------------------------- evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluates like transformers' own loop, with batches distributed across all ranks. If a
        rank dies, its batches are evaluated again."""
        if not isinstance(dataloader, ElasticDataLoader):
            raise ConfigurationError(
                f"evaluation with a {type(dataloader).__name__}; expected a "
                "shoal.ElasticDataLoader(train=False). Pass the Trainer an eval_dataset, and do "
                "not override get_eval_dataloader"
            )
        args, model = self.args, self._distribute()
        loss_only = (
            args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        )
        self.callback_handler.eval_dataloader = dataloader

        def measure(_: int, inputs: Any) -> tuple[dict[str, float], Any]:
            samples = float(find_batch_size(inputs) or 1)
            loss, logits, labels = self.prediction_step(
                model, inputs, loss_only, ignore_keys=ignore_keys
            )
            if logits is not None and self.preprocess_logits_for_metrics is not None:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
            counts = loss is not None and (math.isfinite(loss) or not args.logging_nan_inf_filter)
            weight = samples if counts else 0.0
            return {
                **self._sums_of_batch(),
                "loss": float(loss) * weight if counts else 0.0,
                "weight": weight,
                "samples": samples,
            }, (logits, labels)

        batches = dataloader.evaluation_batches()
        sums, kept = evaluate_on_all(
            current_session(), model, batches, measure, gathers=not loss_only
        )
        predictions = concatenated(
            (logits for logits, _ in kept), concatenates=args.eval_do_concat_batches
        )
        label_ids = concatenated(
            (labels for _, labels in kept), concatenates=args.eval_do_concat_batches
        )
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and predictions is not None and label_ids is not None:
            metrics = denumpify_detensorize(
                self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=label_ids))
            )
        metrics |= self._metrics_of_sums(sums)
        if sums.get("weight"):
            metrics[f"{metric_key_prefix}_loss"] = sums["loss"] / sums["weight"]
        prefix = f"{metric_key_prefix}_"
        named = {
            name if name.startswith(prefix) else prefix + name: value
            for name, value in metrics.items()
        }
        self._report(named)
        return EvalLoopOutput(
            predictions=predictions,
            label_ids=label_ids,
            metrics=named,
            num_samples=int(sums.get("samples", 0)),
        )

    def _report(self, metrics: Mapping[str, Any]) -> None:
        """Reports an evaluation's metrics as `shoal.report` does. The number of reported names is
        limited; half of them are left to the script."""
        session = current_session()
        if session.is_joining:  # its model has not been trained yet
            return
        for name, value in metrics.items():
            reported = session.progress.reported
            if name in reported or len(reported) <= MOST_METRICS // 2:
                with contextlib.suppress(ConfigurationError):  # not a number, or a long name
                    session.progress.report({name: value})

    def _sums_of_batch(self) -> dict[str, float]:
        """Returns further values of the evaluation batch just computed, to be summed over all
        batches."""
        return {}

    def _metrics_of_sums(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns metrics of an evaluation, computed from the sums over all batches."""
        return {}

    # --------------------------------------------------------------------------------------- saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves Shoal's checkpoint in `output_dir/step-<n>`, with the Trainer's state.

        With load_best_model_at_end, returns only when the best checkpoint so far is on disk: if a
        rank dies before it has written its part, saves the checkpoint again.
        """
        args, state, session = self.args, self.state, current_session()
        if session.is_redoing:
            return
        is_best = state.best_global_step == state.global_step and math.isfinite(state.best_metric)
        place = Place.of(args.output_dir, session.settings)
        name = f"step-{state.global_step}"
        if is_best:
            state.best_model_checkpoint = place.text(name)
        saver = CheckpointSaver.of(session)
        while True:
            api.save_checkpoint(
                args.output_dir,
                keep=args.save_total_limit or sys.maxsize,
                best=state.best_metric if is_best else None,
                mode=("max" if args.greater_is_better else "min") if is_best else None,
            )
            if not (is_best and args.load_best_model_at_end) or saver.is_written(
                session, place, name
            ):
                return

    def _load_best_model(self) -> None:
        """Loads the values of the best model on all ranks. Called by transformers at the end of
        `train`.

        Raises:
            ConfigurationError: the best checkpoint is not in the directory as seen by this process.
        """
        model, session = self._distribute(), current_session()
        path = Path(self.state.best_model_checkpoint)
        while True:
            read = api.load_full_state(path) if session.is_first else None
            best = api.broadcast(read)
            if best is not None:
                model.load_full(best)
                return
            if session.is_joining or session.is_redoing or session.has_left:
                return  # this rank's values will be replaced, or are not needed
            # the rank that should have sent them has died

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the unsharded model as transformers' own Trainer does. Must be called on every
        rank; one process writes the files.

        Raises:
            ConfigurationError: the directory is a URL.
        """
        output_dir = output_dir or self.args.output_dir
        if is_url(output_dir):
            raise ConfigurationError(
                f"save_model({output_dir!r}): expected a local directory, because transformers "
                "writes the files; pass one, or save the values alone with "
                f"trainer.model_wrapped.save_model('{output_dir}/model.safetensors')"
            )
        model, complete = self.model, self._distribute().clone()
        # peft and transformers read the module's own state dict too
        self.model = complete.module if isinstance(complete, ShardedModel) else complete
        try:
            self._save(output_dir)
        finally:
            self.model = model

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Rejects the call, since a job trains a single model.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "hyperparameter_search trains several models, but a job trains one; start a job for "
            "each trial"
        )


def _is_hf_dataset(dataset: Any) -> bool:
    import datasets

    return isinstance(dataset, datasets.Dataset)
